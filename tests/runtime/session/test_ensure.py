"""What ensure answers where no receipt stands, from run directories made by hand."""

from pathlib import Path

import pytest

from runtime.errors import EngineDead
from runtime.rundir.attempt import TurnedAway
from runtime.rundir.claims import claim_attempt, make_claim
from runtime.rundir.failure import Failure
from runtime.session.answers import Done, Ended, Held, Lost, Rewound, Running
from runtime.session.ensure import ensure
from runtime.session.steps import Step, StepKind
from tests.runtime.session.written_run import ELSEWHERE, LEASE_S, Run, lost


def test_a_held_step_answers_with_its_failure(run: Run) -> None:
    run.begin()
    run.commit(0)
    failure = Failure.of(EngineDead("engine 2 died"), step="segment/5", time=0.0)
    run.view(state="training", activity="held", failure=failure)
    answer = run.ask("segment/5")
    assert isinstance(answer, Held)
    assert answer.failure.id == failure.id


def test_a_caller_who_saw_more_is_sent_back_and_then_goes_on(run: Run) -> None:
    run.begin()
    run.commit(0)
    run.commit(5)
    ten = run.commit(10)
    run.end("failed", 10, lost())
    run.begin(run.chain.seen[2])
    assert ten not in run.chain.seen[-1:]
    answer = run.ask("segment/15", after=10)
    assert isinstance(answer, Rewound)
    assert answer.to == 5
    # On from there the same step names what it has now seen.
    assert isinstance(run.ask("segment/10", after=5), Running)
    run.commit(10)
    assert isinstance(run.ask("segment/15", after=10), Running)


@pytest.mark.parametrize(("activity", "by"), [("parked", "parked"), ("stopped", "stop")])
def test_a_run_that_ended_resumable_waits_for_a_person(run: Run, activity: str, by: str) -> None:
    run.begin()
    run.commit(5)
    run.end("training", 5, activity=activity, ended_by=by)
    answer = run.ask("segment/9")
    assert isinstance(answer, Ended)
    assert (answer.activity, answer.ended_by, answer.update) == (activity, by, 5)


def test_a_fatal_failure_ends_a_lost_session_is_taken_up_again(run: Run) -> None:
    run.begin()
    run.end("failed", 0, Failure.of(ValueError("wrong"), step="prepare", time=0.0))
    assert isinstance(run.ask("segment/9"), Ended)
    run.begin()
    run.end("failed", 0, lost())
    answer = run.ask("segment/9")
    assert isinstance(answer, Lost)
    assert answer.attempt == 2


def test_the_same_failure_twice_without_a_commit_is_final(run: Run) -> None:
    run.begin()
    zero = run.commit(0)
    run.end("failed", 1, lost("rank 3 is gone after 17 s"))
    run.begin(zero)
    run.commit(4)
    run.end("failed", 1, lost("rank 1 is gone after 9 s"))
    # A commit lay between: progress was made.
    assert isinstance(run.ask("segment/9"), Lost)
    run.begin(run.chain.seen[-2])
    run.end("failed", 1, lost("rank 0 is gone after 2 s"))
    answer = run.ask("segment/9")
    assert isinstance(answer, Ended)
    assert "the same failure twice" in answer.reason


def test_blind_restarts_are_bounded(run: Run) -> None:
    for n in range(3):
        run.begin()
        run.end("failed", 0, lost(f"a different thing {'x' * n}"))
        assert isinstance(run.ask("segment/9"), Lost)
    run.begin()
    run.end("failed", 0, lost("yet another thing"))
    answer = run.ask("segment/9")
    assert isinstance(answer, Ended)
    assert "3 restarts without a commit" in answer.reason


def test_nothing_was_started(run: Run) -> None:
    answer = run.ask("prepare")
    assert isinstance(answer, Lost)
    assert answer.attempt == 0


def test_it_answers_for_a_run_that_does_not_exist(tmp_path: Path) -> None:
    answer = ensure(tmp_path / "nowhere", "prepare", timeout_s=0)
    assert isinstance(answer, Lost)
    assert not (tmp_path / "nowhere").exists()


def test_a_claimed_attempt_is_waited_for(run: Run) -> None:
    claim = make_claim(launcher="local", spec_digest="s", training_digest="t", time=0.0)
    claim_attempt(run.root.attempt(1), claim)
    answer = run.ask("prepare")
    assert isinstance(answer, Running)
    assert "attempt 1" in answer.what


def test_an_attempt_whose_launcher_died_is_lost(run: Run) -> None:
    claim = make_claim(launcher="local", spec_digest="s", training_digest="t", time=0.0)
    dead = claim.model_copy(update={"started": claim.started - 1})
    claim_attempt(run.root.attempt(1), dead)
    answer = run.ask("prepare")
    assert isinstance(answer, Lost)
    assert answer.attempt == 1


@pytest.mark.parametrize("launcher", ["local", "ray", "beaker"])
def test_an_attempt_that_the_owner_turned_away_is_not_waited_for(run: Run, launcher: str) -> None:
    """A frozen owner was taken for lost, and woke up before the next attempt had the lease."""
    run.begin(here=ELSEWHERE)
    claim = make_claim(launcher=launcher, spec_digest="s", training_digest="t", time=0.0)
    second = run.root.attempt(2)
    claim_attempt(second, claim.model_copy(update={"started": claim.started - 1}))
    if launcher != "local":
        second.turned_away.write_bytes(
            TurnedAway(pid=7, host="elsewhere", reason="owned", time=0.0).encode()
        )
    assert isinstance(run.ask("prepare"), Running)
    run.commit(0)
    assert isinstance(run.ask("checkpoint/0"), Done)
    assert isinstance(run.ask("segment/5"), Running)
    # Only where the owner is gone, too, has the run been lost, and with it both attempts.
    for seconds in (LEASE_S + 1, LEASE_S / 10):
        run.clock.advance(seconds)
        answer = run.ask("segment/5")
    assert isinstance(answer, Lost)
    assert answer.attempt == 2


def test_a_queued_job_of_a_scheduler_is_not_lost(run: Run) -> None:
    claim = make_claim(launcher="beaker", spec_digest="s", training_digest="t", time=0.0)
    dead = claim.model_copy(update={"started": claim.started - 1})
    claim_attempt(run.root.attempt(1), dead)
    assert isinstance(run.ask("prepare"), Running)


def test_every_kind_of_step_is_judged(run: Run) -> None:
    run.begin()
    for kind in StepKind:
        at = kind in (StepKind.SEGMENT, StepKind.CHECKPOINT, StepKind.EVALUATION, StepKind.EXPORT)
        name = "s" if kind is StepKind.EVALUATION else None
        step = Step(kind=kind, update=3 if at else None, set_name=name)
        assert isinstance(run.onlooker.look(step), Running)
