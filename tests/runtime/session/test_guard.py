"""The guard with real processes: what it writes, and what no kill can make it write."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from runtime.errors import DiskFull
from runtime.rundir import atomic, enter, history, workflow
from runtime.rundir.attempt import EXIT_NOT_OWNER, AttemptFile, GuardFile
from runtime.rundir.control import Control
from runtime.rundir.journal import read_rows
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.liveness import Mark
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.session.deadman import EXIT_GUARD_GONE
from runtime.session.guard import EXIT_ENDED, EXIT_FAILED, keep_results
from runtime.session.guard import Guard as RealGuard
from runtime.session.succession import Choice

QUICK_CODE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
epoch = json.loads((folder / "guard.json").read_text())["epoch"]
words = {"epoch": epoch, "state": "complete", "ended_by": "max_updates", "update": 0}
(folder / "outcome.json").write_text(json.dumps(words))
"""
QUICK_SESSION = (sys.executable, "-I", "-S", "-c", QUICK_CODE)
"""Only last words: for tests of what the guard writes."""


def newest(root: RunRoot, records) -> Choice:
    """Takes the dummy's commits, which have no files, at their word."""
    return Choice(commit=history.newest_commit(records))


Guard = partial(RealGuard, choose=newest)


def digest_of(update: int) -> str:
    digest = ""
    for u in range(1, update + 1):
        digest = hashlib.sha256(f"{digest}{u}".encode()).hexdigest()
    return digest


def start_guard(attempt: AttemptDir, *argv: str) -> subprocess.Popen[bytes]:
    command = argv or (sys.executable, "-m", "runtime.session.guard", str(attempt.path))
    with attempt.guard_log.open("ab") as log:
        env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)


def killed_guard(attempt: AttemptDir, *, operations: int) -> int:
    """A guard in a fork of this process, killed before the file operation after so many."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            left = iter(range(operations))

            def probe(operation: str, path: Path) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            atomic.probe = probe
            status = Guard(attempt).run()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(condition, what: str, timeout_s: float = 20.0):
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.01)
    return found


def session_pid(attempt: AttemptDir) -> int:
    rows = read_rows(attempt.processes)
    return next(int(r["pid"]) for r in reversed(rows) if r["role"] == "session")


def check_history(root: RunRoot, records) -> None:
    """Whatever was killed: updates ascend by what was counted, none lost, none twice."""
    commits = history.standing_commits(records)
    updates = [c.update for c in commits]
    assert updates == sorted(set(updates))
    for commit in commits:
        assert commit.consumed_digest == digest_of(commit.update)


def test_a_run_from_start_to_complete(attempt, records, root: RunRoot) -> None:
    folder = attempt(updates=3, every=2)
    assert Guard(folder).run() == EXIT_ENDED
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
    assert Guard(second).run() == EXIT_ENDED
    assert records() == before
    assert not second.session_log.exists()


def test_a_stopped_run_goes_on_where_it_stopped(attempt, records, root: RunRoot) -> None:
    folder = attempt(updates=3, hang_at=2)
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    assert Guard(folder).run() == EXIT_ENDED
    assert workflow.read(root).activity == "stopped"
    # The stop was meant for epoch 1: the next one is not stopped by it.
    assert Guard(attempt(2, updates=3)).run() == EXIT_ENDED
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
    assert guard.wait(20) == EXIT_ENDED
    assert (last_end().state, last_end().activity) == ("training", "stopped")


def test_a_session_deaf_to_sigterm_is_killed_after_its_grace(attempt, last_end) -> None:
    folder = attempt(updates=3, hang_at=1, deaf=True, grace_s=0.3)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    guard.terminate()
    assert guard.wait(20) == EXIT_ENDED
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
    assert guard.wait(20) == EXIT_ENDED
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
    assert Guard(folder).run() == EXIT_ENDED
    assert enter.started(int((folder.path / "child.pid").read_text())) is None


def test_a_killed_guard_takes_the_session_with_it(attempt, records, root: RunRoot) -> None:
    folder = attempt(hang_at=1, spawn=True)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    session = psutil.Process(session_pid(folder))
    child = psutil.Process(int((folder.path / "child.pid").read_text()))
    guard.kill()
    guard.wait(10)
    _, alive = psutil.wait_procs([session, child], timeout=10)
    assert not alive
    assert "leaves with its children: the guard is gone" in folder.session_log.read_text()
    assert history.current_end(records()) is None
    assert Guard(attempt(2)).run() == EXIT_ENDED
    assert "vanished" in history.newest_epoch(records()).reason
    check_history(root, records())


def test_a_frozen_session_of_a_dead_guard_is_reaped(attempt, records) -> None:
    folder = attempt(hang_at=1)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    session = psutil.Process(session_pid(folder))
    session.suspend()
    guard.kill()
    guard.wait(10)
    assert session.is_running()
    assert Guard(attempt(2)).run() == EXIT_ENDED
    assert enter.started(session.pid) is None


def test_a_second_guard_is_told_who_owns_the_run(attempt, records, root: RunRoot) -> None:
    folder = attempt(hang_at=1)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    second = attempt(2)
    assert start_guard(second).wait(20) == EXIT_NOT_OWNER
    said = second.guard_log.read_text()
    for part in ("another process owns this run", f"pid {guard.pid}", "attempt 1, epoch 1"):
        assert part in said
    assert "delete" not in said
    assert len([r for r in records() if isinstance(r, EpochRecord)]) == 1
    guard.terminate()
    assert guard.wait(20) == EXIT_ENDED


def test_a_frozen_owner_writes_nothing_after_a_takeover(attempt, records, root: RunRoot) -> None:
    """SIGSTOP of guard and session past the lease, takeover from "another host", SIGCONT."""
    folder = attempt(updates=4, hang_at=2)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    session = psutil.Process(session_pid(folder))
    session.suspend()
    os.kill(guard.pid, signal.SIGSTOP)
    elsewhere = HostBoot("another-host", "another-boot")
    assert Guard(attempt(2, updates=4), here=elsewhere).run() == EXIT_ENDED
    assert session.is_running()
    after = snapshot(root)
    session.resume()
    os.kill(guard.pid, signal.SIGCONT)
    assert guard.wait(20) == EXIT_NOT_OWNER
    wait_for(lambda: enter.started(session.pid) is None, "the old session to leave")
    assert snapshot(root) == after
    assert history.is_complete(records())
    check_history(root, records())


def test_an_old_session_alone_that_wakes_up_cannot_commit(attempt, records, root) -> None:
    """The session is frozen and its guard killed; it wakes after the run went on without it."""
    folder = attempt(updates=4, hang_at=2)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    session = psutil.Process(session_pid(folder))
    session.suspend()
    guard.kill()
    guard.wait(10)
    elsewhere = HostBoot("another-host", "another-boot")
    assert Guard(attempt(2, updates=4), here=elsewhere).run() == EXIT_ENDED
    after = snapshot(root)
    # Its way on is open: the stop file would let the dummy's loop end and write its last words.
    session.send_signal(signal.SIGTERM)
    session.resume()
    wait_for(lambda: enter.started(session.pid) is None, "the old session to leave")
    assert snapshot(root) == after


def test_a_lost_lease_ends_the_session_and_writes_nothing(attempt, records, root) -> None:
    folder = attempt(hang_at=1)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    before = records()
    root.lease.unlink()
    assert guard.wait(20) == EXIT_NOT_OWNER
    assert records() == before
    assert "ownership lost" in folder.guard_log.read_text()


def test_kill_at_every_write_of_the_session(attempt, records, root: RunRoot) -> None:
    """One run, taken up again and again; epoch k's session is killed before its k-th operation."""
    number = 0
    while not history.is_complete(records()):
        assert number < 45
        number += 1
        Guard(attempt(number, updates=6, every=2, kill_at=number - 1)).run()
        check_history(root, records())
    # A session that was killed later made more operations than it took to complete the run.
    assert number > 12
    commits = [r for r in records() if isinstance(r, CommitRecord)]
    assert [c.update for c in commits] == [0, 2, 4, 6]


def test_kill_at_every_write_of_the_guard(attempt, records, root: RunRoot) -> None:
    number = kills = 0
    while True:
        number += 1
        assert number < 60
        folder = attempt(number)
        spec = AttemptFile.read(folder).model_copy(update={"session": QUICK_SESSION})
        atomic.write_bytes(folder.attempt, spec.encode())
        status = killed_guard(folder, operations=number - 1)
        ends = [r for r in records() if isinstance(r, EndRecord)]
        assert len(ends) <= 1
        if status == EXIT_ENDED:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills >= 15
    assert history.is_complete(records())
    assert workflow.read(root).state == "complete"


def test_a_session_that_finds_its_commit_damaged_begins_a_further_epoch(
    attempt, records, root: RunRoot
) -> None:
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    Guard(attempt(updates=9, hang_at=3)).run()
    assert history.committed_update(records()) == 3
    assert Guard(attempt(2, updates=5, distrusts=[3])).run() == EXIT_ENDED
    epochs = [(r.epoch, r.attempt, r.restored) for r in records() if r.kind == "epoch"]
    assert epochs == [(1, 1, None), (2, 2, "e1.u3"), (3, 2, "e1.u2")]
    assert records()[-1].epoch == workflow.read(root).epoch == 3
    check_history(root, records())


def test_a_full_disk_before_the_epoch_starts_nothing(attempt, records, root, monkeypatch) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.parent == root.chain:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(atomic, "probe", full)
    folder = attempt()
    with pytest.raises(DiskFull):
        Guard(folder).run()
    assert records() == ()
    assert not folder.session_log.exists()
    assert Mark.of(root.lease) is None


def test_the_reserve_makes_room_for_the_end_record(attempt, last_end, root, monkeypatch) -> None:
    folder = attempt()

    def full(operation: str, path: Path) -> None:
        # Room for all until the session has ended; then only what the reserve frees.
        if operation == "write" and folder.outcome.exists() and folder.reserve.exists():
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(atomic, "probe", full)
    assert Guard(folder).run() == EXIT_ENDED
    assert last_end().state == "complete"
    assert not folder.reserve.exists()


def test_a_full_disk_for_the_view_ends_nothing(attempt, records, root, monkeypatch) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "write" and "workflow.json" in path.name:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(atomic, "probe", full)
    assert Guard(attempt()).run() == EXIT_ENDED
    assert workflow.current(root, records(), now=0.0).state == "complete"


def test_an_epoch_that_finds_nothing_to_restore_ends_with_what_was_found(
    attempt, records, root: RunRoot
) -> None:
    """The dummy's commits hold no ledger, so that the real check refuses them all."""
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    Guard(attempt(hang_at=2)).run()
    before = history.standing_commits(records())
    second = attempt(2)
    assert RealGuard(second).run() == EXIT_FAILED
    end = records()[-1]
    assert (end.state, end.failure.error_class) == ("failed", "NoValidCommit")
    assert "checkpoints/000002-e1" in end.failure.message
    assert end.failure.retry == "nobody"
    assert workflow.read(root).failure == end.failure
    assert not second.session_log.exists()
    # Nothing was undone by it: with the files back, the run goes on from where it was.
    assert history.standing_commits(records()) == before
    assert Guard(attempt(3)).run() == EXIT_ENDED
    check_history(root, records())


def test_commits_passed_over_are_named_in_the_epoch(attempt, records, root: RunRoot) -> None:
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    Guard(attempt(hang_at=2)).run()

    def choose(root: RunRoot, records) -> Choice:
        newest, older = history.standing_commits(records)[:-3:-1]
        return Choice(commit=older, passed_over=(f"{newest.folder}: 3 bytes",))

    assert RealGuard(attempt(2), choose=choose).run() == EXIT_ENDED
    epoch = history.newest_epoch(records())
    assert epoch.restored == "e1.u1"
    assert "checkpoints/000002-e1: 3 bytes" in epoch.reason
    check_history(root, records())


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
    assert Guard(folder).run() == EXIT_ENDED
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
    assert guard.wait(60) == (EXIT_FAILED if asked else EXIT_ENDED)
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
    assert guard.wait(60) == EXIT_ENDED
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


def test_exit_status_of_the_switch_is_its_own() -> None:
    assert EXIT_GUARD_GONE not in (EXIT_ENDED, EXIT_FAILED, EXIT_NOT_OWNER, 2)


def snapshot(root: RunRoot) -> dict[str, tuple[int, bytes]]:
    """Everything in the root but the old attempt's own folder: history, views, other attempts."""
    own = root.attempt(1).path
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes())
        for p in sorted(root.path.rglob("*"))
        if p.is_file() and own not in p.parents
    }
