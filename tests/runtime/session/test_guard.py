"""The guard with real processes: what it starts, what it passes on, and what it leaves."""

import errno
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from runtime.launch.entry import EXIT_REFUSED
from runtime.rundir import atomic, enter, history, workflow
from runtime.rundir.attempt import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_NOT_OWNER,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    AttemptFile,
    GuardFile,
)
from runtime.rundir.control import Control
from runtime.rundir.journal import read_rows
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Mark
from runtime.rundir.records import EndRecord
from runtime.session.deadman import EXIT_GUARD_GONE
from runtime.session.guard import keep_results
from tests.runtime.session.guards import (
    QUICK_CODE,
    Guard,
    check_history,
    session_pid,
    start_guard,
    wait_for,
)


def test_a_run_from_start_to_complete(attempt, records, root: RunRoot) -> None:
    folder = attempt(updates=3, every=2)
    assert Guard(folder).run() == EXIT_COMPLETE
    kinds = [(r.kind, getattr(r, "update", None)) for r in records()]
    assert kinds == [("epoch", None), ("commit", 0), ("commit", 2), ("end", 3)]
    assert records()[0].lease_s == 1.2
    view = workflow.read(root)
    assert (view.state, view.activity, view.update) == ("complete", None, 3)
    assert (view.seen.checkpoints, view.last_checkpoint) == (1, 2)
    assert Mark.of(root.lease) is None
    events = [r["event"] for r in read_rows(root.journal)]
    assert events == ["epoch.taken", "session.started", "run.completed"]


def test_a_complete_run_starts_nothing(attempt, records) -> None:
    Guard(attempt()).run()
    before = records()
    second = attempt(2)
    assert Guard(second).run() == EXIT_COMPLETE
    assert records() == before
    assert not second.session_log.exists()


def test_a_stopped_run_goes_on_where_it_stopped(attempt, records, root: RunRoot) -> None:
    folder = attempt(updates=3, hang_at=2)
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    assert Guard(folder).run() == EXIT_STOPPED
    assert workflow.read(root).activity == "stopped"
    # The stop was meant for epoch 1: the next one is not stopped by it.
    assert Guard(attempt(2, updates=3)).run() == EXIT_COMPLETE
    assert history.is_complete(records())
    second = history.newest_epoch(records())
    assert second.restored == "e1.u2"
    assert "epoch 1 ended by stop" in second.reason
    check_history(root, records())


def test_sigterm_is_passed_on_and_the_session_ends_in_order(attempt, last_end, root) -> None:
    folder = attempt(updates=3, hang_at=1)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    guard.terminate()
    assert guard.wait(20) == EXIT_TERMINATED
    end = last_end()
    assert (end.state, end.activity, end.ended_by) == ("training", "stopped", "sigterm")


def test_a_session_deaf_to_sigterm_is_killed_after_its_grace(attempt, last_end) -> None:
    folder = attempt(updates=3, hang_at=1, deaf=True, grace_s=0.3)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    guard.terminate()
    assert guard.wait(20) == EXIT_TERMINATED
    end = last_end()
    assert (end.state, end.activity, end.ended_by) == ("training", "stopped", "sigterm")
    assert end.failure is None


def test_stop_now_kills_a_session_that_hangs(attempt, last_end, root: RunRoot) -> None:
    folder = attempt(updates=3, hang_at=1, deaf=True)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    # The dummy would obey any stop file: freeze it, as a hung session would not look.
    os.kill(session_pid(folder), signal.SIGSTOP)
    Control(root).request_stop("now", epoch=1, by="test", time=0.0)
    assert guard.wait(20) == EXIT_STOPPED
    assert last_end().ended_by == "stop_now"


@pytest.mark.parametrize(
    ("asked", "message", "retry"),
    [
        ({"fail": "engine 3 died"}, "engine 3 died", "session"),
        ({"exit_status": 9}, "exited with status 9 after it said complete", "task"),
        ({"silent": True}, "exited with status 0 without last words", "task"),
        ({"kill_at": 9}, "was ended by SIGKILL", "task"),
    ],
)
def test_a_session_that_dies_leaves_a_failure(
    attempt, last_end, root: RunRoot, asked: dict, message: str, retry: str
) -> None:
    folder = attempt(**asked)
    assert Guard(folder).run() == EXIT_FAILED
    end = last_end()
    assert end.state == "failed"
    assert message in end.failure.message
    assert end.failure.retry == retry
    view = workflow.read(root)
    assert (view.state, view.failure) == ("failed", end.failure)
    failed = [r for r in read_rows(root.journal) if r["event"] == "run.failed"]
    assert failed[0]["failure"]["id"] == end.failure.id
    assert not folder.reserve.exists()


def test_the_same_death_twice_has_one_fingerprint(attempt, records) -> None:
    # The first epoch's five operations of commit 0 are not needed again in the second.
    for number, kill_at in ((1, 12), (2, 7)):
        Guard(attempt(number, updates=9, every=5, kill_at=kill_at)).run()
    ends = [r for r in records() if isinstance(r, EndRecord)]
    assert len({e.failure.fingerprint for e in ends}) == 1
    assert history.is_deterministic(records(), ends[0].failure.fingerprint)


def test_descendants_of_the_session_do_not_outlive_it(attempt) -> None:
    folder = attempt(spawn=True)
    assert Guard(folder).run() == EXIT_COMPLETE
    assert enter.started(int((folder.path / "child.pid").read_text())) is None


def test_every_process_is_entered_before_its_exec(attempt, root: RunRoot) -> None:
    folder = attempt(hang_at=1)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    rows = {r["role"]: r for r in read_rows(folder.processes)}
    assert set(rows) == {"guard", "session"}
    assert rows["guard"]["pid"] == guard.pid == GuardFile.read(folder).pid
    session = psutil.Process(rows["session"]["pid"])
    assert "dummy_session.py" in " ".join(session.cmdline())
    assert session.environ()["MILEPOST_EPOCH"] == "1"
    guard.terminate()
    guard.wait(20)


def test_the_companion_belongs_to_nobody(attempt, root: RunRoot) -> None:
    folder = attempt(updates=1)
    out = folder.path / "seen"
    code = f"import os; open({str(out)!r}, 'w').write(str(sorted(k for k in os.environ)))"
    spec = AttemptFile.read(folder).model_copy(update={"companion": (sys.executable, "-c", code)})
    atomic.write_bytes(folder.attempt, spec.encode())
    assert Guard(folder).run() == EXIT_COMPLETE
    wait_for(lambda: out.exists() and out.read_text(), "the companion")
    assert "MILEPOST_ATTEMPT_DIR" not in out.read_text()


@pytest.mark.parametrize("asked", [{}, {"hang_at": 1}])
def test_the_story_is_left_where_the_scheduler_keeps_results(
    attempt, root: RunRoot, tmp_path: Path, asked: dict[str, int]
) -> None:
    folder = attempt(updates=3, **asked)
    kept = tmp_path / "output"
    kept.mkdir()
    spec = AttemptFile.read(folder).model_copy(update={"results": str(kept)})
    atomic.write_bytes(folder.attempt, spec.encode())
    guard = start_guard(folder)
    if asked:
        wait_for((folder.path / "hanging").exists, "the session to hang")
        os.kill(session_pid(folder), signal.SIGKILL)
    assert guard.wait(60) == (EXIT_FAILED if asked else EXIT_COMPLETE)
    assert (kept / "workflow.json").read_bytes() == root.workflow.read_bytes()
    assert (kept / "journal.jsonl").read_bytes() == root.journal.read_bytes()
    assert (kept / "run.log").exists()


def test_results_that_cannot_be_kept_leave_the_exit_status_as_it_is(
    attempt, root: RunRoot, last_end
) -> None:
    """The session takes the file away that says where to; the guard needs it once more."""
    code = f"{QUICK_CODE}\n(folder / 'attempt.json').unlink()\n"
    folder = attempt()
    spec = AttemptFile.read(folder).model_copy(
        update={"session": (sys.executable, "-I", "-S", "-c", code), "results": str(root.path)}
    )
    atomic.write_bytes(folder.attempt, spec.encode())
    guard = start_guard(folder)
    assert guard.wait(60) == EXIT_COMPLETE
    assert last_end().state == "complete"
    assert "attempt 1: results not kept: " in folder.guard_log.read_text()


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_a_disk_that_fails_over_the_results_raises_nothing(
    attempt, root: RunRoot, monkeypatch, capsys, error: int
) -> None:
    folder = attempt()
    spec = AttemptFile.read(folder).model_copy(update={"results": str(root.path.parent)})
    atomic.write_bytes(folder.attempt, spec.encode())
    asked = []

    def fails(path: Path, pattern: str):
        asked.append(path)
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(Path, "rglob", fails)
    keep_results(folder)
    assert asked == [root.reports]
    said = capsys.readouterr().err
    assert os.strerror(error) in said
    assert said.count("\n") == 1


def test_every_exit_status_says_one_thing() -> None:
    of_guards = (EXIT_COMPLETE, EXIT_FAILED, EXIT_NOT_OWNER, EXIT_STOPPED, EXIT_TERMINATED)
    said = [*of_guards, EXIT_GUARD_GONE, EXIT_REFUSED, 2]
    assert len({*said}) == len(said)
