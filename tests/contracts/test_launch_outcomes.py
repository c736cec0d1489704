"""How an attempt ended is the run directory's word, whatever its process left with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.clock import ManualClock
from runtime.errors import ContractViolation, Interrupted
from runtime.launch import reporting
from runtime.launch.standing import AttemptClass
from runtime.launch.watching import END_LAG_S, Watcher
from runtime.rundir.records import EndRecord
from tests.contracts.launch_worlds import Outcome, SchedulerWorld
from tests.runtime.launch.owned_runs import end, ended, own

SILENT: tuple[Outcome, ...] = ("succeeded", "failed", "stopped", "terminated")
"""What tells of the end of a process, and not of what made it end."""

ENDS: dict[str, tuple[EndRecord, AttemptClass, str]] = {
    "complete": (ended("complete", "max_updates"), AttemptClass.SUCCEEDED, "over"),
    "stopped": (ended("training", "stop"), AttemptClass.CANCELED, "over"),
    "parked": (ended("training", "parked"), AttemptClass.CANCELED, "over"),
    "terminated": (ended("training", "sigterm"), AttemptClass.INTERRUPTED, "again"),
    "failed": (ended("failed", "failure", ContractViolation("x")), AttemptClass.FAILED, "over"),
    "lost hardware": (
        ended("failed", "failure", Interrupted("a node")),
        AttemptClass.INTERRUPTED,
        "again",
    ),
}


def reported(world: SchedulerWorld, monkeypatch: pytest.MonkeyPatch) -> AttemptClass:
    """The class in ``milepost status``."""
    monkeypatch.setenv("MILEPOST_LAUNCH_RECEIPTS", str(world.folder / "receipts-one"))
    monkeypatch.setattr(reporting, "backend_of", lambda spec: world.backend())
    report = reporting.report(world.root, world.loaded().spec)
    assert report is not None
    assert report.standing is not None, report.problem
    return report.standing.kind


@pytest.mark.parametrize("how", ENDS)
def test_an_end_record_decides_and_no_exit_status(
    scheduler: SchedulerWorld, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, kind, follows = ENDS[how]
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    end(scheduler.root, record)
    for outcome in SILENT:
        scheduler.become(scheduler.submission(loaded).key, outcome)
        standing = scheduler.watcher(loaded).look(1)
        assert standing.kind is kind, (outcome, standing)
        assert scheduler.watcher(loaded).decide(1, standing).what == follows
        assert reported(scheduler, monkeypatch) is kind
        # So that whoever follows shows a stop as one, and not as a failure.
        assert standing.activity == ("stopped" if kind is AttemptClass.CANCELED else None)


@pytest.mark.parametrize("how", ["stopped", "parked"])
def test_what_was_stopped_stays_so_whatever_takes_its_rest_away(
    scheduler: SchedulerWorld, how: str
) -> None:
    """Its cluster was ended after it, or its hardware taken as it left."""
    record, kind, follows = ENDS[how]
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    end(scheduler.root, record)
    key = scheduler.submission(loaded).key
    watcher = scheduler.watcher(loaded)
    scheduler.become(key, "taken")
    taken = watcher.look(1)
    scheduler.forget(key)
    for standing in (taken, watcher.look(1)):
        assert (standing.kind, standing.activity) == (kind, "stopped")
        assert watcher.decide(1, standing).what == follows


@pytest.mark.parametrize("is_owner", [False, True], ids=["never the owner", "the owner"])
def test_without_an_end_record_no_attempt_has_succeeded(
    scheduler: SchedulerWorld, is_owner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, clock = scheduler.loaded(), ManualClock()
    watcher = Watcher(loaded, replace(scheduler.sender(), clock=clock))
    scheduler.launch(loaded)
    if is_owner:
        own(scheduler.root, attempt=1)
    scheduler.become(scheduler.submission(loaded).key, "succeeded")
    assert reported(scheduler, monkeypatch) is AttemptClass.STOPPED
    for _ in range(2):
        # On a file system that is shared the record may come to be seen later than the exit.
        standing = watcher.look(1)
        assert standing.kind is AttemptClass.STOPPED
        assert watcher.decide(1, standing).what == "wait"
        clock.advance(END_LAG_S / 2)
    decision = watcher.decide(1, watcher.look(1))
    assert (decision.what, decision.why) == ("over", "stopped")
    if is_owner:
        end(scheduler.root, ended("complete", "max_updates"))
        assert watcher.look(1).kind is AttemptClass.SUCCEEDED
        assert reported(scheduler, monkeypatch) is AttemptClass.SUCCEEDED


def test_who_finds_the_run_complete_has_succeeded(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    scheduler.launch(loaded, lost_attempt=1)
    own(scheduler.root, attempt=1)
    end(scheduler.root, ended("complete", "max_updates"))
    scheduler.become(scheduler.submission(loaded, 2).key, "succeeded")
    assert scheduler.watcher(loaded).look(2).kind is AttemptClass.SUCCEEDED


def test_the_end_of_an_attempt_is_its_own_after_another_took_the_run_up(
    scheduler: SchedulerWorld,
) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    end(scheduler.root, ended("training", "sigterm"))
    own(scheduler.root, attempt=2, epoch=2)
    scheduler.become(scheduler.submission(loaded).key, "succeeded")
    standing = scheduler.watcher(loaded).look(1)
    assert (standing.kind, "SIGTERM" in standing.reason) == (AttemptClass.INTERRUPTED, True)


@pytest.mark.parametrize(
    ("outcome", "kind", "follows"),
    [
        ("succeeded", AttemptClass.SUCCEEDED, "over"),
        ("failed", AttemptClass.FAILED, "over"),
        ("stopped", AttemptClass.CANCELED, "over"),
        ("terminated", AttemptClass.INTERRUPTED, "again"),
    ],
)
def test_where_the_run_directory_cannot_be_read_its_guard_speaks_for_it(
    scheduler: SchedulerWorld, outcome: Outcome, kind: AttemptClass, follows: str
) -> None:
    """A guard leaves with 0 only when the end record says complete."""
    loaded = scheduler.far()
    scheduler.launch(loaded)
    scheduler.become(scheduler.submission(loaded).key, outcome)
    watcher = scheduler.watcher(loaded)
    standing = watcher.look(1)
    assert standing.kind is kind
    assert watcher.decide(1, standing).what == follows
    if outcome == "succeeded":
        assert "cannot be read from here" in standing.reason
