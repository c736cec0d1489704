"""Guards and sessions that are killed, frozen or overtaken: what no kill can make them write."""

import os
import shutil
import signal

import psutil

from runtime.rundir import atomic, enter, history, workflow
from runtime.rundir.attempt import (
    EXIT_COMPLETE,
    EXIT_NOT_OWNER,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    AttemptFile,
    TurnedAway,
)
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from tests.runtime.session.guards import (
    QUICK_SESSION,
    Guard,
    check_history,
    killed_guard,
    session_pid,
    snapshot,
    start_guard,
    wait_for,
)

UNLOST_S = 60.0
"""A lease that a busy machine keeps, where nobody waits for one that is dead."""


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
    assert Guard(attempt(2)).run() == EXIT_COMPLETE
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
    assert Guard(attempt(2)).run() == EXIT_COMPLETE
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
    # For whoever sees its folder and not its process, as with a job of a scheduler.
    mark = TurnedAway.decode(second.turned_away.read_bytes(), second.turned_away)
    assert "attempt 1, epoch 1" in mark.reason
    guard.terminate()
    assert guard.wait(20) == EXIT_TERMINATED
    # The scheduler starts the same attempt again.
    assert Guard(second).run() == EXIT_COMPLETE
    assert not second.turned_away.exists()


def test_who_comes_up_after_a_newer_attempt_has_ended_undoes_no_stop(attempt, records) -> None:
    """A job that waited in a queue for as long as the next attempt lived; or one started again."""
    late, newer = attempt(1), attempt(2, hang_at=1, lease_s=UNLOST_S)
    Control(newer.root).request_stop("stop", epoch=1, by="test", time=0.0)
    assert Guard(newer).run() == EXIT_STOPPED
    before = records()
    assert Guard(late).run() == EXIT_NOT_OWNER
    assert records() == before
    mark = TurnedAway.decode(late.turned_away.read_bytes(), late.turned_away)
    assert "attempt 2 has owned the run since" in mark.reason
    assert Guard(attempt(3)).run() == EXIT_COMPLETE
    assert Guard(late).run() == EXIT_COMPLETE  # nothing is left to be undone


def test_who_is_started_again_after_a_stop_undoes_no_stop(attempt, records) -> None:
    """A scheduler that tries again whatever left with another status than 0."""
    folder = attempt(hang_at=1, lease_s=UNLOST_S)
    Control(folder.root).request_stop("stop", epoch=1, by="test", time=0.0)
    assert Guard(folder).run() == EXIT_STOPPED
    before = records()
    assert Guard(folder).run() == EXIT_STOPPED
    assert records() == before
    assert Guard(attempt(2)).run() == EXIT_COMPLETE


def test_a_root_filled_from_a_copy_is_taken_up_whatever_attempts_the_lost_machine_had(
    attempt, records, root: RunRoot
) -> None:
    lost = attempt(3, hang_at=1, lease_s=UNLOST_S)
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    assert Guard(lost).run() == EXIT_STOPPED
    # All that a new machine has of them is the chain, up to an epoch or a commit.
    (root.chain / f"{records()[-1].seq}.json").unlink()
    shutil.rmtree(lost.path)
    first = attempt(1)
    assert Guard(first).run() == EXIT_COMPLETE
    assert history.newest_epoch(records()).attempt == 1
    assert not first.turned_away.exists()


def test_a_frozen_owner_writes_nothing_after_a_takeover(attempt, records, root: RunRoot) -> None:
    """SIGSTOP of guard and session past the lease, takeover from "another host", SIGCONT."""
    folder = attempt(updates=4, hang_at=2)
    guard = start_guard(folder)
    wait_for((folder.path / "hanging").exists, "the session to hang")
    session = psutil.Process(session_pid(folder))
    session.suspend()
    os.kill(guard.pid, signal.SIGSTOP)
    elsewhere = HostBoot("another-host", "another-boot")
    assert Guard(attempt(2, updates=4), here=elsewhere).run() == EXIT_COMPLETE
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
    assert Guard(attempt(2, updates=4), here=elsewhere).run() == EXIT_COMPLETE
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
        if status == EXIT_COMPLETE:
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
    assert Guard(attempt(2, updates=5, distrusts=[3])).run() == EXIT_COMPLETE
    epochs = [(r.epoch, r.attempt, r.restored) for r in records() if r.kind == "epoch"]
    assert epochs == [(1, 1, None), (2, 2, "e1.u3"), (3, 2, "e1.u2")]
    assert records()[-1].epoch == workflow.read(root).epoch == 3
    check_history(root, records())
