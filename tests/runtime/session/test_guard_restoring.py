"""Guards without room on the disk, or without anything to restore."""

import errno
from pathlib import Path

import pytest

from runtime.errors import DiskFull
from runtime.rundir import atomic, history, workflow
from runtime.rundir.attempt import EXIT_COMPLETE, EXIT_FAILED
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Mark
from runtime.session.guard import Guard as RealGuard
from runtime.session.succession import Choice
from tests.runtime.session.guards import Guard, check_history


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
    assert Guard(folder).run() == EXIT_COMPLETE
    assert last_end().state == "complete"
    assert not folder.reserve.exists()


def test_a_full_disk_for_the_view_ends_nothing(attempt, records, root, monkeypatch) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "write" and "workflow.json" in path.name:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(atomic, "probe", full)
    assert Guard(attempt()).run() == EXIT_COMPLETE
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
    assert Guard(attempt(3)).run() == EXIT_COMPLETE
    check_history(root, records())


def test_commits_passed_over_are_named_in_the_epoch(attempt, records, root: RunRoot) -> None:
    Control(root).request_stop("stop", epoch=1, by="test", time=0.0)
    Guard(attempt(hang_at=2)).run()

    def choose(root: RunRoot, records) -> Choice:
        newest, older = history.standing_commits(records)[:-3:-1]
        return Choice(commit=older, passed_over=(f"{newest.folder}: 3 bytes",))

    assert RealGuard(attempt(2), choose=choose).run() == EXIT_COMPLETE
    epoch = history.newest_epoch(records())
    assert epoch.restored == "e1.u1"
    assert "checkpoints/000002-e1: 3 bytes" in epoch.reason
    check_history(root, records())
