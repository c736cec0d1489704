"""A launcher dies at every point between asking for an attempt and following it.

Whoever asks for the same attempt afterwards, itself or from another machine, gets it: one job is at
the scheduler in the end, as if nobody had died, and it is followed to its end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from runtime import faults
from runtime.errors import ConfigError
from runtime.faults import Fault, FaultPlan, Kind
from runtime.faults.points import POINTS
from runtime.launch.attempts import Launch
from runtime.launch.standing import AttemptClass
from runtime.launch.submitting import SENT_WITHIN_S, asked_attempt
from tests.contracts.launch_worlds import Outcome, SchedulerWorld
from tests.runtime.launch.owned_runs import end, ended, own

SENDING = tuple(p.name for p in POINTS if p.where == "runtime.launch.submitting:_send")


class Died(BaseException):
    """In place of the death of this process: nothing in the launcher's way out handles it."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultPlan:
    def die() -> NoReturn:
        raise Died

    monkeypatch.setattr(sys.modules[FaultPlan.__module__], "_die", die)
    made = FaultPlan(tmp_path / "plan")
    monkeypatch.setattr(faults, "plan", made)
    return made


def dies(
    world: SchedulerWorld, plan: FaultPlan, point: str, is_far: bool, lost: int | None
) -> None:
    """Let machine ``one`` ask for an attempt and die at a point."""
    plan.arm([Fault(id=f"{point} after {lost}", point=point, kind=Kind.KILL)])
    with pytest.raises(Died):
        asks(world, is_far, lost, "one")
    assert len(plan.fired(f"{point} after {lost}")) == 1


def asks(world: SchedulerWorld, is_far: bool, lost: int | None, by: str) -> Launch:
    return world.launch(world.far() if is_far else world.loaded(), lost_attempt=lost, by=by)


def test_the_points_are_those_of_sending() -> None:
    assert SENDING == ("launch.receipt", "launch.send", "launch.sent", "launch.follow")


@pytest.mark.parametrize("point", SENDING)
@pytest.mark.parametrize(
    ("first", "is_far"),
    [("one", False), ("other", False), ("one", True)],
    ids=["itself", "another machine", "itself, far"],
)
def test_whoever_asks_again_gets_the_attempt_that_the_dead_one_asked_for(
    scheduler: SchedulerWorld, plan: FaultPlan, point: str, first: str, is_far: bool
) -> None:
    loaded = scheduler.far() if is_far else scheduler.loaded()
    askers = ("one", "other") if first == "one" else ("other", "one")
    for number, lost in ((1, None), (2, 1)):
        dies(scheduler, plan, point, is_far, lost)
        for by in askers:
            assert asks(scheduler, is_far, lost, by).attempt == number
            assert scheduler.attempts() == [*range(1, number + 1)]
        key = scheduler.submission(loaded, number).key
        scheduler.become(key, "running")
        for by in askers:
            assert scheduler.watcher(loaded, by=by).look(number).kind is AttemptClass.RUNNING
        scheduler.become(key, "taken")


@pytest.mark.parametrize("point", SENDING)
def test_what_ended_before_anybody_asked_again_is_not_followed_by_another(
    scheduler: SchedulerWorld, plan: FaultPlan, point: str
) -> None:
    """The terminal of a run whose flow broke: it asks once more for the attempt it is about."""
    loaded = scheduler.loaded()
    assert asked_attempt(loaded, scheduler.sender()) == 1
    dies(scheduler, plan, point, False, 0)
    if point in ("launch.sent", "launch.follow"):
        own(scheduler.root, attempt=1)
        end(scheduler.root, ended("training", "stop"))
        scheduler.become(scheduler.submission(loaded).key, "stopped")
    for by in ("other", "one"):
        assert asks(scheduler, False, 0, by).attempt == 1
    assert scheduler.attempts() == [1]
    kind = scheduler.watcher(loaded).look(1).kind
    is_over = point in ("launch.sent", "launch.follow")
    assert kind is (AttemptClass.CANCELED if is_over else AttemptClass.PENDING)


@pytest.mark.parametrize("point", SENDING)
@pytest.mark.parametrize("by", ["one", "other"])
def test_another_run_file_is_not_kept_from_running_by_a_claim_that_nobody_sends(
    scheduler: SchedulerWorld, plan: FaultPlan, point: str, by: str
) -> None:
    dies(scheduler, plan, point, False, None)
    other = scheduler.loaded("core.lr=0.123")

    def refused() -> None:
        with pytest.raises(ConfigError, match="trains something else"):
            scheduler.launch(other, by=by)

    refused()  # the first one may be about to send it
    claim = scheduler.root.attempt(1).claim
    os.utime(claim, (claim.stat().st_atime, claim.stat().st_mtime - SENT_WITHIN_S))
    if point in ("launch.sent", "launch.follow"):
        refused()
        assert scheduler.attempts() == [1]
    else:
        assert (scheduler.launch(other, by=by).attempt, scheduler.attempts()) == (2, [2])
        # Its own comes too late now.
        with pytest.raises(ConfigError, match="trains something else"):
            asks(scheduler, False, None, "one")


@pytest.mark.parametrize("outcome", ["failed", "canceled", "taken"])
@pytest.mark.parametrize("by", ["one", "other"])
def test_an_attempt_that_was_over_before_it_owned_the_run_keeps_nobody_from_running_it(
    scheduler: SchedulerWorld, outcome: Outcome, by: str
) -> None:
    """An image that could not be fetched, a host that was refused: nothing of it is in the run."""
    loaded = scheduler.loaded()
    assert scheduler.launch(loaded).attempt == 1
    sender = scheduler.sender(by=by)
    key = scheduler.submission(loaded).key
    for alive in (None, "running"):
        if alive is not None:
            scheduler.become(key, "running")
        assert asked_attempt(loaded, sender) == scheduler.launch(loaded, by=by).attempt == 1
    scheduler.become(key, outcome)
    # Whoever follows that attempt has it, over as it is; who asks for the run gets the next one.
    assert scheduler.launch(loaded, lost_attempt=0, by=by).attempt == 1
    assert asked_attempt(loaded, sender) == scheduler.launch(loaded, by=by).attempt == 2
    assert asked_attempt(loaded, sender) == scheduler.launch(loaded, by=by).attempt == 2
    assert scheduler.attempts() == [1, 2]
