"""What every backend promises to whoever launches a run, and every scheduler's backend besides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from runtime.clock import ManualClock
from runtime.errors import (
    ConfigError,
    CredentialsRefused,
    LaunchRefused,
    RetryBy,
    ServiceUnavailable,
)
from runtime.launch.attempts import Launch
from runtime.launch.standing import AttemptClass
from runtime.launch.submitting import submit_run
from runtime.launch.watching import Watcher
from tests.contracts.launch_worlds import (
    SECRET,
    SURROUNDINGS,
    Outcome,
    SchedulerWorld,
    World,
)
from tests.runtime.launch.owned_runs import LEASE_S, end, ended, own, refresh

# -- every backend -------------------------------------------------------------------------------


def test_asked_twice_one_attempt_runs(world: World) -> None:
    first, second = world.launch(world.loaded()), world.launch(world.loaded())
    assert (first.how, first.attempt) == ("started", 1)
    assert (second.how, second.attempt) == ("attached", 1)
    assert world.attempts() == [1]


def test_of_rival_launchers_one_starts_the_run(world: World) -> None:
    launches: list[Launch] = []
    barrier = threading.Barrier(4)
    loaded = world.loaded()

    def rival(by: str) -> None:
        barrier.wait()
        launches.append(world.launch(loaded, by=by))

    rivals = [threading.Thread(target=rival, args=(f"machine-{n}",)) for n in range(4)]
    for each in rivals:
        each.start()
    for each in rivals:
        each.join()
    assert sorted(each.how for each in launches) == [*["attached"] * 3, "started"]
    assert {each.attempt for each in launches} == {1}
    assert world.attempts() == [1]


def test_another_training_is_refused_by_its_digest(world: World) -> None:
    world.launch(world.loaded())
    for by in ("one", "other"):
        with pytest.raises(ConfigError, match=r"trains something else .*training digest"):
            world.launch(world.loaded("core.lr=0.123"), by=by)
    assert world.attempts() == [1]
    assert world.launch(world.loaded()).how == "attached"


def test_the_same_training_with_another_run_file_is_told_whose_goes_on(world: World) -> None:
    world.launch(world.loaded())
    longer = world.launch(world.loaded("core.max_updates=7"))
    assert (longer.how, longer.attempt) == ("attached", 1)
    assert "attempt 1 goes on with its own run file" in longer.notice
    assert world.attempts() == [1]


def test_a_lost_attempt_is_followed_once(world: World) -> None:
    world.launch(world.loaded())
    second = world.launch(world.loaded(), lost_attempt=1)
    assert (second.how, second.attempt) == ("started", 2)
    again = world.launch(world.loaded(), lost_attempt=1)
    assert (again.how, again.attempt) == ("attached", 2)
    # Whoever comes as late as this, finds what it asked for made, and over.
    own(world.root, attempt=2)
    end(world.root, ended("training", "stop"))
    for by in ("one", "other"):
        late = world.launch(world.loaded(), lost_attempt=1, by=by)
        assert (late.how, late.attempt) == ("attached", 2)
    assert world.attempts() == [1, 2]
    # A person who asks for the run to go on names no attempt.
    assert world.launch(world.loaded()).attempt == 3


def test_nothing_that_is_written_or_sent_holds_a_secret(world: World) -> None:
    world.launch(world.loaded('launch.env={KEPT="kept"}'))
    texts = list(world.written())
    if isinstance(world, SchedulerWorld):
        assert world.receipts(world.loaded())
        texts += [json.dumps(world.documents()), repr(world.sender())]
        texts += [payload.model_dump_json() for payload in world.payloads()]
        assert any("kept" in text for text in texts)
        assert not any(world.server.token in text for text in texts)
    assert texts
    assert not any(secret in text for text in texts for secret in (SECRET, SURROUNDINGS))


# -- every scheduler's -----------------------------------------------------------------------------


def test_what_is_sent_is_what_is_rendered(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    submission = scheduler.submission(loaded)
    rendered = scheduler.backend().render(submission)
    assert scheduler.documents() == {submission.key: rendered}
    assert scheduler.backend().render(submission) == rendered


def test_a_lost_answer_leaves_one_job_and_a_receipt_that_names_it(
    scheduler: SchedulerWorld,
) -> None:
    scheduler.server.lose_answers = 1
    launch = scheduler.launch(scheduler.loaded())
    assert (launch.attempt, scheduler.attempts(), scheduler.server.num_posts) == (1, [1], 1)
    (receipt,) = scheduler.receipts(scheduler.loaded())
    assert receipt.job is not None


@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
def test_whoever_died_before_the_call_is_followed_by_anybody(
    scheduler: SchedulerWorld, is_far: bool
) -> None:
    loaded = scheduler.far() if is_far else scheduler.loaded()
    scheduler.server.fail_posts = 1
    with pytest.raises(ServiceUnavailable) as refused:
        scheduler.launch(loaded)
    assert refused.value.retry is RetryBy.LAUNCH
    (receipt,) = scheduler.receipts(loaded)
    assert (receipt.job, scheduler.attempts()) == (None, [])
    # The number is claimed, where a claim can be seen: another machine sends the same thing.
    assert scheduler.launch(loaded, by="other").attempt == 1
    assert scheduler.attempts() == [1]
    launch = scheduler.launch(loaded)
    assert (launch.how, launch.attempt, scheduler.attempts()) == ("attached", 1, [1])


@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
def test_another_machine_attaches_and_sees_the_run_through(
    scheduler: SchedulerWorld, is_far: bool
) -> None:
    loaded = scheduler.far() if is_far else scheduler.loaded()
    scheduler.launch(loaded)
    launch = scheduler.launch(loaded, by="other")
    assert (launch.how, launch.attempt, scheduler.attempts()) == ("attached", 1, [1])
    scheduler.become(scheduler.submission(loaded).key, "running")
    assert scheduler.watcher(loaded, by="other").look(1).kind is AttemptClass.RUNNING


def test_a_root_that_cannot_be_seen_is_guarded_by_the_name_alone(
    scheduler: SchedulerWorld,
) -> None:
    scheduler.launch(scheduler.far())
    for by in ("one", "other"):
        with pytest.raises(ConfigError, match="trains something else"):
            scheduler.launch(scheduler.far("core.lr=0.123"), by=by)
        longer = scheduler.launch(scheduler.far("core.max_updates=7"), by=by)
        assert "attempt 1 goes on with its own run file" in longer.notice
    assert scheduler.attempts() == [1]
    # Being refused took nothing of ours away: the first one is followed still.
    scheduler.launch(scheduler.far(), lost_attempt=1)
    assert scheduler.attempts() == [1, 2]


def test_a_breach_is_refused_before_a_number_is_taken(scheduler: SchedulerWorld) -> None:
    what, said = scheduler.breach
    sets = [] if what == "no image" else [what]
    sender = scheduler.sender()
    if what == "no image":
        sender = replace(sender, image=None)
    with pytest.raises(LaunchRefused, match=said):
        submit_run(scheduler.loaded(*sets), sender)
    assert (scheduler.server.num_posts, scheduler.receipts(scheduler.loaded())) == (0, [])
    assert not scheduler.root.path.exists()


def test_a_wrong_token_is_final_and_not_told(scheduler: SchedulerWorld) -> None:
    with pytest.raises(CredentialsRefused) as refused:
        submit_run(scheduler.loaded(), scheduler.sender(token="a-token-that-is-wrong"))
    assert refused.value.retry is RetryBy.NOBODY
    assert "a-token-that-is-wrong" not in f"{refused.value} {refused.value.detail}"
    assert scheduler.attempts() == []


EXPECTED: dict[Outcome, tuple[tuple[AttemptClass, ...], str]] = {
    "running": ((AttemptClass.RUNNING,), "wait"),
    "succeeded": ((AttemptClass.STOPPED,), "wait"),
    "failed": ((AttemptClass.FAILED,), "over"),
    "taken": ((AttemptClass.PREEMPTED, AttemptClass.INTERRUPTED), "again"),
    "canceled": ((AttemptClass.CANCELED,), "over"),
    "turned away": ((AttemptClass.STOPPED,), "again"),
    "stopped": ((AttemptClass.CANCELED,), "over"),
    "terminated": ((AttemptClass.INTERRUPTED,), "again"),
}
"""Of attempts that left no word in the run directory."""


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_an_outcome_has_its_class_and_what_follows(
    scheduler: SchedulerWorld, outcome: Outcome
) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    watcher = scheduler.watcher(loaded)
    assert not watcher.look(1).kind.is_over
    scheduler.become(scheduler.submission(loaded).key, outcome)
    standing = watcher.look(1)
    kinds, follows = EXPECTED[outcome]
    assert standing.kind in kinds, standing
    assert watcher.decide(1, standing).what == follows


def test_an_attempt_that_the_owner_turns_away_waits_for_it_and_uses_none_up(
    scheduler: SchedulerWorld,
) -> None:
    """The first was taken for lost, and its guard lives: on another host, behind a partition."""
    loaded, clock = scheduler.loaded(), ManualClock()
    watcher = Watcher(loaded, replace(scheduler.sender(), clock=clock))
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    assert scheduler.launch(loaded, lost_attempt=1).attempt == 2
    scheduler.become(scheduler.submission(loaded, 2).key, "turned away")
    for _ in range(3):
        standing = watcher.look(2)
        assert (standing.kind, standing.is_turned_away) == (AttemptClass.STOPPED, True)
        assert "attempt 1 (epoch 1, pid 7 on elsewhere)" in standing.reason
        assert watcher.decide(2, standing).what == "wait"
        clock.advance(LEASE_S / 2)
        refresh(scheduler.root, clock)
    for seconds in (LEASE_S + 1, LEASE_S / 10):
        assert watcher.decide(2, standing).what == "wait"
        clock.advance(seconds)
    again = watcher.decide(2, standing)
    assert (again.what, again.delay_s) == ("again", 10.0)
    assert "has not refreshed its lease" in again.why
    # Whoever launches knows now that both are gone: it goes on, and attaches to neither.
    third = scheduler.launch(loaded, lost_attempt=2)
    assert (third.how, third.attempt) == ("started", 3)
    scheduler.become(scheduler.submission(loaded, 3).key, "taken")
    assert watcher.decide(3, watcher.look(3)).delay_s == 20.0  # the second lost, not the third
    kept = {each.attempt: each.turned_away for each in scheduler.receipts(loaded)}
    assert kept == {1: False, 2: True, 3: False}


def test_what_was_taken_away_beside_a_living_owner_is_not_followed_yet(
    scheduler: SchedulerWorld,
) -> None:
    """The second goes before its guard could be turned away: the third would be, in its place."""
    loaded, clock = scheduler.loaded(), ManualClock()
    watcher = Watcher(loaded, replace(scheduler.sender(), clock=clock))
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    scheduler.launch(loaded, lost_attempt=1)
    scheduler.become(scheduler.submission(loaded, 2).key, "taken")
    for _ in range(3):
        waits = watcher.decide(2, watcher.look(2))
        assert (waits.what, "attempt 1 (epoch 1" in waits.why) == ("wait", True)
        clock.advance(LEASE_S / 2)
        refresh(scheduler.root, clock)
    for seconds in (LEASE_S + 1, LEASE_S / 10):
        assert watcher.decide(2, watcher.look(2)).what == "wait"
        clock.advance(seconds)
    assert watcher.decide(2, watcher.look(2)).what == "again"


def test_who_owned_the_run_and_lost_its_lease_was_interrupted(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    own(scheduler.root, attempt=1)
    scheduler.become(scheduler.submission(loaded).key, "turned away")
    standing = scheduler.watcher(loaded).look(1)
    assert (standing.kind, standing.is_turned_away) == (AttemptClass.INTERRUPTED, False)
    assert "lease" in standing.reason
    # Counted like any other that was lost: a file system that keeps no lease is not tried for ever.
    for epoch, (attempt, follows) in enumerate(((4, "again"), (5, "over")), start=2):
        own(scheduler.root, attempt=attempt, epoch=epoch)
        assert scheduler.watcher(loaded).decide(attempt, standing).what == follows


def test_what_its_scheduler_forgot_is_over_and_did_not_succeed(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    scheduler.forget(scheduler.submission(loaded).key)
    standing = scheduler.watcher(loaded).look(1)
    assert standing.kind in (AttemptClass.STOPPED, AttemptClass.INTERRUPTED)
    assert standing.reason


def test_stopping_ends_a_job_once_and_takes_nothing_amiss(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    scheduler.become(scheduler.submission(loaded).key, "running")
    (receipt,) = scheduler.receipts(loaded)
    backend = scheduler.backend()
    backend.stop(receipt)
    standing = backend.look(receipt)
    assert standing.kind in (AttemptClass.CANCELED, AttemptClass.STOPPED)
    assert scheduler.watcher(loaded).decide(1, standing).what == "over"
    backend.stop(receipt)
    backend.stop(receipt.model_copy(update={"key": "never-sent-a1", "job": None}))
    assert backend.look(receipt).kind is standing.kind


def test_stopping_leaves_what_is_over_as_it_is(scheduler: SchedulerWorld) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    scheduler.become(scheduler.submission(loaded).key, "failed")
    (receipt,) = scheduler.receipts(loaded)
    backend = scheduler.backend()
    backend.stop(receipt)
    assert backend.look(receipt).kind in (AttemptClass.FAILED, AttemptClass.STOPPED)


CALLS: dict[str, Callable[[Any, Any, Any], object]] = {
    "submit": lambda backend, submission, receipt: backend.submit(submission),
    "look": lambda backend, submission, receipt: backend.look(receipt),
    "stop": lambda backend, submission, receipt: backend.stop(receipt),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_scheduler_that_hangs_is_left_at_the_deadline(
    scheduler: SchedulerWorld, call: str
) -> None:
    loaded = scheduler.loaded()
    scheduler.launch(loaded)
    (receipt,) = scheduler.receipts(loaded)
    scheduler.server.released.clear()
    # Without a deadline of its own the call would wait for as long as the test may last.
    with pytest.raises(ServiceUnavailable) as left:
        CALLS[call](scheduler.backend(deadline_s=0.2), scheduler.submission(loaded, 2), receipt)
    assert left.value.retry is RetryBy.LAUNCH
    # What was sent must have met the closed door before it opens; what never left never comes.
    scheduler.server.held.wait(10)
    scheduler.server.released.set()
    assert not scheduler.watcher(loaded).look(1).kind.is_over
