"""Real processes: who is entered, who is reaped, and who must not be."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.rundir import enter
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import (
    HostBoot,
    ProcessRegistry,
    free_environment,
    is_alive,
    kill_exactly,
    owned_environment,
    reap,
)

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
# Detaches from its parent, so that only its environment tells whose it is.
ORPHAN_CODE = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
ORPHAN = (sys.executable, "-c", ORPHAN_CODE)


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def registry(root: RunRoot) -> ProcessRegistry:
    root.attempt(1).path.mkdir()
    return ProcessRegistry(root.attempt(1).processes)


def spawn(spawned, argv, env=None) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    spawned.append(process)
    return process, process.stdout.readline().strip()


def owned(root: RunRoot, epoch: int) -> dict[str, str]:
    return owned_environment(os.environ, attempt_dir=root.attempt(1).path, epoch=epoch)


def test_a_process_is_entered_under_the_pid_it_keeps(root, registry, spawned) -> None:
    process, _ = spawn(spawned, registry.command("engine 0", SLEEP), owned(root, 7))
    (entry,) = registry.entries()
    assert (entry.pid, entry.role, entry.epoch) == (process.pid, "engine 0", 7)
    assert entry.where == HostBoot.here()
    assert is_alive(entry.pid, entry.started)


def test_reaping_kills_what_is_registered_and_its_descendants(root, registry, spawned) -> None:
    nested = (
        sys.executable,
        "-c",
        f"import subprocess, time; p = subprocess.Popen({list(SLEEP)!r}); time.sleep(600)",
    )
    env = free_environment(os.environ)
    process, _ = spawn(spawned, registry.command("session", nested), env)
    reaped = reap(root, here=HostBoot.here(), up_to_epoch=0)
    assert {role for _, role in reaped.killed} == {"session", "child of session"}
    assert reaped.remaining == ()
    assert process.wait(5) == -signal.SIGKILL


def test_reaping_finds_a_detached_process_by_its_environment(root, registry, spawned) -> None:
    _, pid = spawn(spawned, ORPHAN, owned(root, 2))
    assert reap(root, here=HostBoot.here(), up_to_epoch=1).killed == ()
    assert enter.started(int(pid)) is not None
    assert reap(root, here=HostBoot.here(), up_to_epoch=2).killed == ((int(pid), "descendant"),)
    assert enter.started(int(pid)) is None


def test_another_runs_processes_are_left_alone(root, registry, spawned, tmp_path) -> None:
    env = owned_environment(os.environ, attempt_dir=tmp_path / "other/attempts/1", epoch=1)
    process, _ = spawn(spawned, SLEEP, env)
    assert reap(root, here=HostBoot.here(), up_to_epoch=9).killed == ()
    assert process.poll() is None


def test_a_pid_that_was_reused_is_left_alone(root, registry, spawned) -> None:
    process, _ = spawn(spawned, SLEEP)
    registry.enter("session", process.pid)
    row = json.loads(root.attempt(1).processes.read_text())
    for change in ({"started": row["started"] - 1}, {"boot_id": "before"}, {"host": "other"}):
        root.attempt(1).processes.write_text(json.dumps({**row, **change}) + "\n")
        assert reap(root, here=HostBoot.here(), up_to_epoch=9).killed == ()
    assert process.poll() is None
    assert not kill_exactly(process.pid, row["started"] - 1)
    assert process.poll() is None
    assert kill_exactly(process.pid, row["started"])
    assert process.wait(5) == -signal.SIGKILL


def test_a_later_epochs_process_is_left_alone(root, registry, spawned) -> None:
    process, _ = spawn(spawned, SLEEP)
    registry.enter("session", process.pid, epoch=3)
    assert reap(root, here=HostBoot.here(), up_to_epoch=2).killed == ()
    assert process.poll() is None


def test_the_reaper_spares_itself_and_its_ancestors(root, registry) -> None:
    registry.enter("session")
    registry.enter("launcher", os.getppid())
    assert reap(root, here=HostBoot.here(), up_to_epoch=9).killed == ()


def test_a_frozen_process_is_reaped_too(root, registry, spawned) -> None:
    process, _ = spawn(spawned, registry.command("session", SLEEP))
    process.send_signal(signal.SIGSTOP)
    assert len(reap(root, here=HostBoot.here(), up_to_epoch=0).killed) == 1
    assert process.wait(5) == -signal.SIGKILL


def test_torn_rows_of_a_registry_are_left_out(root, registry) -> None:
    registry.enter("a")
    with root.attempt(1).processes.open("ab") as file:
        file.write(b'{"pid": 1, "sta\n')
    registry.enter("b")
    assert [e.role for e in registry.entries()] == ["a", "b"]
    assert ProcessRegistry(Path("nowhere")).entries() == []


def test_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert enter.started(process.pid) is None
    process.wait()


def test_a_name_with_spaces_and_parentheses_is_read_past(spawned, tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(sys.executable)
    process, _ = spawn(spawned, (str(odd), *SLEEP[1:]))
    assert is_alive(process.pid, enter.started(process.pid))
