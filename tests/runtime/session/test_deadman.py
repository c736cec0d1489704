"""The dead-man's switch on real processes: who leaves, when, and with whom."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.rundir import atomic, enter
from runtime.rundir.attempt import GuardFile
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.liveness import Mark
from runtime.rundir.processes import HostBoot
from runtime.session import deadman
from runtime.session.deadman import EXIT_GUARD_GONE, Switch

WATCHER = """
import subprocess, sys, time
from runtime.session import deadman

def start_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sys.stdout.write(f"{child.pid}\\n")
    sys.stdout.flush()

if sys.argv[2:] == ["before"]:
    start_child()
deadman.watch(sys.argv[1])
if sys.argv[2:] == ["watched"]:
    start_child()
time.sleep(600)
"""
"""A child is started before the watch, or when the watch is on; or there is none."""


@pytest.fixture
def switch() -> Iterator[Switch]:
    with Switch() as switch:
        yield switch


@pytest.fixture
def attempt(root: RunRoot) -> AttemptDir:
    attempt = root.attempt(1)
    attempt.path.mkdir()
    root.lease.write_text("x")
    return attempt


def announce(attempt: AttemptDir, switch: Switch, **changes: object) -> GuardFile:
    here = HostBoot.here()
    mark = Mark.of(attempt.root.lease)
    guard = GuardFile(
        epoch=3,
        host=here.host,
        boot_id=here.boot_id,
        pid=os.getpid(),
        started=enter.started(os.getpid()),
        fifo=str(switch.path),
        lease=str(attempt.root.lease),
        lease_s=600.0,
        lease_device=mark.identity[0],
        lease_inode=mark.identity[1],
    ).model_copy(update=changes)
    atomic.write_bytes(attempt.guard, guard.encode())
    return guard


def start(attempt: AttemptDir, *child: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(attempt.path), *child],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **env},
    )


def start_with_child(attempt: AttemptDir, when: str) -> tuple[subprocess.Popen[str], int]:
    """Whoever may leave at any moment must not fork then: that child would be nobody's."""
    process = start(attempt, when)
    return process, int(process.stdout.readline())


def left(process: subprocess.Popen[str], because: str) -> None:
    _, said = process.communicate(timeout=20)
    assert process.returncode == EXIT_GUARD_GONE
    assert because in said


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while enter.started(pid) is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_a_process_leaves_with_its_children_when_the_guard_does(attempt, switch) -> None:
    announce(attempt, switch)
    process, child = start_with_child(attempt, "watched")
    assert process.poll() is None
    switch.close()
    left(process, "the guard is gone")
    assert gone(child)
    assert not switch.path.exists()


def test_a_process_of_an_epoch_that_is_over_leaves_at_once(attempt, switch) -> None:
    announce(attempt, switch)
    process = start(attempt, MILEPOST_EPOCH="2")
    left(process, "epoch 2 is over, the guard is at 3")


def test_a_process_that_starts_after_its_guard_died_leaves_at_once(attempt, switch) -> None:
    announce(attempt, switch)
    switch.close()
    process = start(attempt)
    left(process, "the guard's switch is gone")


def test_a_process_whose_guard_was_killed_before_it_looked_leaves(attempt, switch) -> None:
    """A guard that was killed removes nothing: the FIFO is there, but nobody holds it."""
    fifo = attempt.path / "fifo"
    os.mkfifo(fifo)
    announce(attempt, switch, fifo=str(fifo))
    process = start(attempt)
    left(process, "the guard is gone")


@pytest.mark.parametrize("host", [None, "elsewhere"])
def test_a_lease_that_is_not_refreshed_ends_the_process(attempt, switch, host) -> None:
    """The guard is frozen, or on another host: its switch says nothing, its lease does."""
    elsewhere = {"host": host, "fifo": "/nonexistent/fifo"} if host else {}
    announce(attempt, switch, lease_s=0.6, **elsewhere)
    process, child = start_with_child(attempt, "before")
    left(process, "the lease is lost: the last successful refresh is")
    assert gone(child)


def test_a_parting_that_hangs_does_not_keep_the_process(attempt, switch, monkeypatch) -> None:
    monkeypatch.setattr(deadman, "_PARTING_S", 0.05)
    announce(attempt, switch)
    release, did_leave = threading.Event(), threading.Event()
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        did_leave.set()

    thread = deadman.watch(attempt.path, epoch=3, on_lost=release.wait, leave=leave)
    assert thread.daemon
    switch.close()
    assert did_leave.wait(10)
    assert statuses == [EXIT_GUARD_GONE]
    release.set()
    thread.join(10)


def test_switches_of_dead_guards_that_nobody_heard_of_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Switch() as living:
        dead = tmp_path / "mp-dead"
        dead.mkdir()
        os.mkfifo(dead / "guard")
        for folder in (dead, living.path.parent):
            os.utime(folder, (0, 0))
        young = tmp_path / "mp-young"
        young.mkdir()
        os.mkfifo(young / "guard")
        with Switch():
            assert not dead.exists()
            assert young.exists()
            assert living.path.exists()
