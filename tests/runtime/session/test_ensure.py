"""Every answer of ensure, from run directories made by hand and with a clock that is told."""

import json
import os
import threading
from pathlib import Path

import pytest

from runtime.clock import ManualClock
from runtime.errors import EngineDead, SessionLost, WaitTimeout
from runtime.evaluation.receipts import (
    Request,
    Result,
    TryError,
    claim_try,
    finish_try,
    write_request,
)
from runtime.policy import PolicyId
from runtime.rundir import atomic, enter, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.claims import claim_attempt, make_claim
from runtime.rundir.control import Control
from runtime.rundir.failure import Failure
from runtime.rundir.layout import EXPORT_RECEIPT, RunRoot
from runtime.rundir.processes import HostBoot
from runtime.rundir.receipts import Receipt, write_receipt
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.rundir.workflow import Progress
from runtime.session.answers import Done, Ended, Held, Lost, Rewound, Running
from runtime.session.ensure import Onlooker, ensure
from runtime.session.steps import Step, StepKind

ELSEWHERE = HostBoot("elsewhere", "boot")
LEASE_S = 30.0


class Run:
    """A run directory written the way guard and session do, without either."""

    def __init__(self, root: RunRoot) -> None:
        self.root = root
        self.chain = Chain(root)
        self.clock = ManualClock()
        self.slept: list[float] = []
        self.onlooker = Onlooker(root, clock=self.clock, sleep=self.sleep)
        self.epoch = 0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    def begin(self, restored: CommitRecord | None = None, *, here: HostBoot | None = None) -> None:
        """A new epoch; its guard is this very process, or one elsewhere."""
        self.epoch += 1
        host = here or HostBoot.here()
        self.chain.append(
            EpochRecord(
                epoch=self.epoch,
                time=0.0,
                attempt=self.epoch,
                host=host.host,
                pid=os.getpid(),
                boot_id=host.boot_id,
                started=enter.started(os.getpid()),
                reason="test",
                restored=restored.policy if restored else None,
                restored_seq=restored.seq if restored else None,
                lease_s=None if self.chain.seen else LEASE_S,
            )
        )
        self.refresh()

    def refresh(self) -> None:
        self.root.lease.touch()
        os.utime(self.root.lease, ns=(0, int(self.clock.time() * 1e9)))

    def commit(self, update: int) -> CommitRecord:
        return self.chain.append(
            CommitRecord(
                epoch=self.epoch,
                time=0.0,
                format_version=1,
                update=update,
                policy=str(PolicyId(self.epoch, update)),
                training_digest="t",
                layout={},
                data_fingerprint="d",
                ledger_checksum="l",
                consumed_digest="c",
                folder=f"checkpoints/{update:06d}-e{self.epoch}",
                files=(),
            )
        )

    def end(self, state: str, update: int, failure: Failure | None = None, **more: str) -> None:
        self.chain.append(
            EndRecord(
                epoch=self.epoch,
                time=0.0,
                state=state,
                activity=more.get("activity"),
                ended_by=more.get("ended_by", "test"),
                update=update,
                failure=failure,
            )
        )

    def view(self, **fields: object) -> None:
        now = self.clock.time()
        rebuilt = workflow.rebuild(self.root, self.chain.seen, now=now)
        moved = Progress(time=now, what="training")
        workflow.write(self.root, rebuilt.model_copy(update={"progress": moved, **fields}))

    def beat(self, count: int) -> None:
        view = workflow.read(self.root)
        beat = view.heartbeat.model_copy(update={"count": count})
        workflow.write(self.root, view.model_copy(update={"heartbeat": beat}))

    def ask(self, step: str, *, after: int = 0):
        parsed = Step.parse(step)
        wanted = Step(kind=parsed.kind, update=parsed.update, set_name=parsed.set_name, after=after)
        return self.onlooker.look(wanted)


@pytest.fixture
def run(root: RunRoot) -> Run:
    return Run(root)


def lost(message: str = "gone") -> Failure:
    return Failure.of(SessionLost(message), step="segment/5", time=0.0)


def put(path: Path, **fields: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))


# -- receipts -----------------------------------------------------------------------------------


def test_prepare_is_proved_by_its_receipt_alone(run: Run) -> None:
    run.begin()
    assert isinstance(run.ask("prepare"), Running)
    put(run.root.prepared / "receipt.json", fingerprint="f", time=3.0)
    answer = run.ask("prepare")
    assert isinstance(answer, Done)
    assert answer.receipt.detail["fingerprint"] == "f"


def test_rendezvous_is_the_present_epoch_in_training(run: Run) -> None:
    run.begin()
    assert isinstance(run.ask("rendezvous"), Running)
    run.view(state="preparing", activity="running")
    assert isinstance(run.ask("rendezvous"), Running)
    run.view(state="training", activity="running")
    assert run.ask("rendezvous").receipt.epoch == 1
    commit = run.commit(5)
    run.end("training", 5, activity="stopped")
    assert isinstance(run.ask("rendezvous"), Ended)
    run.begin(commit)
    # The old session's view proves nothing about the new epoch.
    assert isinstance(run.ask("rendezvous"), Running)
    run.view(state="training", activity="resuming")
    assert isinstance(run.ask("rendezvous"), Running)
    run.view(state="training", activity="running")
    assert run.ask("rendezvous").receipt.detail["restored"] == "e1.u5"


def test_a_checkpoint_is_met_by_any_standing_commit_at_or_after_it(run: Run) -> None:
    run.begin()
    run.commit(0)
    run.commit(4)
    run.commit(9)
    assert run.ask("checkpoint/3").receipt.update == 4
    assert run.ask("checkpoint/4").receipt.update == 4
    assert run.ask("checkpoint/5").receipt.update == 9
    assert isinstance(run.ask("checkpoint/10"), Running)


def test_a_segment_is_done_when_trained_its_checkpoint_when_committed(run: Run) -> None:
    run.begin()
    run.commit(0)
    run.view(update=7, state="training")
    assert run.ask("segment/7").receipt.update == 7
    assert isinstance(run.ask("checkpoint/7"), Running)
    assert isinstance(run.ask("segment/8"), Running)


def evaluate(run: Run, policy: str, *, state: str, mean: float) -> None:
    folder = run.root.evaluation(policy, "held-out")
    request = Request(
        time=0.0,
        run="t",
        policy=policy,
        set="held-out",
        kind="cadence",
        required=False,
        mode="shared",
        attempt=1,
        epoch=1,
        set_digest="d",
        sampling={},
        seed=0,
    )
    write_request(folder, request)
    number, _ = claim_try(folder, by="test", time=0.0)
    error = None
    if state == "failed":
        error = TryError(error_class="E", fingerprint="f", message="m")
    result = Result(time=1.0, state=state, error=error, metrics={"mean": mean})
    finish_try(folder, number, result)


def test_a_result_counts_when_its_commit_stands_and_its_policy_does(run: Run) -> None:
    run.begin()
    zero = run.commit(0)
    evaluate(run, "e1.u5", state="succeeded", mean=0.5)
    assert isinstance(run.ask("evaluation/5/held-out"), Running)
    run.begin(zero)
    run.commit(5)
    # Update 5 is committed, but by other weights than those evaluated.
    assert isinstance(run.ask("evaluation/5/held-out"), Running)
    evaluate(run, "e2.u5", state="failed", mean=0.0)
    assert isinstance(run.ask("evaluation/5/held-out"), Running)
    evaluate(run, "e2.u5", state="succeeded", mean=0.7)
    receipt = run.ask("evaluation/5/held-out").receipt
    assert receipt.policy == PolicyId(2, 5)
    assert receipt.detail["metrics"] == {"mean": 0.7}
    assert isinstance(run.ask("evaluation/5/other"), Running)
    assert workflow.count_seen(run.root, run.chain.seen, update=5).evaluations == 1


def test_an_export_is_proved_by_its_receipt_at_a_standing_policy(run: Run) -> None:
    run.begin()
    five = run.commit(5)
    put(run.root.export / EXPORT_RECEIPT, epoch=1, policy="e1.u6", update=6)
    assert isinstance(run.ask("export/5"), Running)
    put(run.root.export_at(5) / EXPORT_RECEIPT, epoch=2, policy="e1.u5", update=5)
    assert run.ask("export/5").receipt.policy == PolicyId(1, 5)
    run.begin(five)
    # 6 was exported by epoch 1 and undone by the restart at 5.
    assert isinstance(run.ask("export/6"), Running)
    assert isinstance(run.ask("export/5"), Done)


def test_the_cache_step_has_a_receipt_of_its_own(run: Run) -> None:
    run.begin()
    assert isinstance(run.ask("cache"), Running)
    write_receipt(run.root, Receipt(step="cache", epoch=1, update=0, time=0.0))
    assert isinstance(run.ask("cache"), Done)


def test_steps_beyond_the_end_of_a_complete_run_are_done_at_the_actual_update(run: Run) -> None:
    run.begin()
    run.commit(73)
    assert isinstance(run.ask("finish"), Running)
    run.end("complete", 73, ended_by="wall_clock")
    for step in ("segment/100", "checkpoint/100", "evaluation/100/held-out", "export/100"):
        receipt = run.ask(step).receipt
        assert (receipt.step, receipt.update) == (step, 73)
        assert receipt.detail["ended_by"] == "wall_clock"
    assert run.ask("finish").receipt.update == 73
    assert isinstance(run.ask("segment/50"), Done)
    # Within the run and without evidence: it ended without it, which is not the same as done.
    answer = run.ask("evaluation/73/held-out")
    assert isinstance(answer, Ended)
    assert answer.state == "complete"


# -- what is no receipt -------------------------------------------------------------------------


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


def test_an_attempt_that_the_owner_turned_away_is_not_waited_for(run: Run) -> None:
    """A frozen owner was taken for lost, and woke up before the next attempt had the lease."""
    run.begin(here=ELSEWHERE)
    claim = make_claim(launcher="local", spec_digest="s", training_digest="t", time=0.0)
    claim_attempt(run.root.attempt(2), claim.model_copy(update={"started": claim.started - 1}))
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


# -- the owner's life ---------------------------------------------------------------------------


def test_a_dead_guard_of_this_host_is_lost_at_once(run: Run) -> None:
    run.begin()
    newest = run.chain.seen[-1]
    assert isinstance(run.ask("segment/5"), Running)
    atomic.write_bytes(
        run.root.chain / "0.json",
        newest.model_copy(update={"started": newest.started - 1}).model_dump_json().encode(),
    )
    run.onlooker = Onlooker(run.root, clock=run.clock, sleep=run.sleep)
    assert isinstance(run.ask("segment/5"), Lost)


def test_an_owner_elsewhere_is_lost_after_a_whole_lease_and_two_looks(run: Run) -> None:
    run.begin(here=ELSEWHERE)
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S - 1)
    assert isinstance(run.ask("segment/5"), Running)
    run.refresh()
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S + 1)
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S / 10)
    answer = run.ask("segment/5")
    assert isinstance(answer, Lost)
    assert "has not refreshed its lease" in answer.reason


def test_a_looker_that_slept_takes_nobody_for_dead(run: Run) -> None:
    run.begin(here=ELSEWHERE)
    run.ask("segment/5")
    run.clock.advance(10 * LEASE_S)
    run.refresh()
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(10 * LEASE_S)
    assert isinstance(run.ask("segment/5"), Running)


def test_a_silent_session_of_a_living_guard_is_stale_on_two_looks(run: Run) -> None:
    run.begin()
    run.view(state="training", activity="running")
    assert not run.ask("segment/5").is_stale
    run.clock.advance(20)
    run.refresh()
    assert not run.ask("segment/5").is_stale
    run.clock.advance(20)
    run.refresh()
    assert run.ask("segment/5").is_stale
    run.beat(2)
    assert not run.ask("segment/5").is_stale


def test_a_damaged_view_hides_nothing_that_the_chain_knows(run: Run) -> None:
    run.begin()
    run.commit(0)
    run.commit(5)
    run.root.workflow.write_text('{"state": "compl')
    assert run.ask("checkpoint/5").receipt.update == 5
    assert isinstance(run.ask("checkpoint/6"), Running)
    view = workflow.current(run.root, run.chain.seen, now=0.0)
    assert (view.state, view.update, view.last_checkpoint) == ("training", 5, 5)


# -- waiting ------------------------------------------------------------------------------------


def test_a_call_polls_until_its_timeout_and_every_poll_attaches(run: Run) -> None:
    run.begin()
    control = Control(run.root)
    assert control.attached() is None
    answer = run.onlooker.ensure(Step.parse("segment/5"), timeout_s=20, poll_s=0.5)
    assert isinstance(answer, Running)
    assert run.slept == [0.5] * 40
    assert control.attached() is not None


def test_the_deadline_counts_from_the_last_progress_of_any_kind(run: Run) -> None:
    run.begin()
    step = Step.parse("checkpoint/5")
    for update in range(1, 4):
        run.view(update=update, state="training")
        run.refresh()
        run.onlooker.look(step)
        run.clock.advance(25)
        run.refresh()
        run.onlooker.look(step)
        run.clock.advance(25)
        answer = run.onlooker.ensure(step, timeout_s=0, deadline_s=60)
        assert answer.idle_s == 50
    run.refresh()
    run.clock.advance(11)
    with pytest.raises(WaitTimeout, match="checkpoint/5: nothing moved for 61 s"):
        run.onlooker.ensure(step, timeout_s=0, deadline_s=60)


def test_a_step_done_while_waiting_is_answered_at_the_next_poll(run: Run) -> None:
    run.begin()
    run.onlooker = Onlooker(run.root, clock=run.clock, sleep=lambda _: run.commit(5))
    assert isinstance(run.onlooker.ensure(Step.parse("checkpoint/5")), Done)


def test_many_callers_get_the_same_answer(run: Run) -> None:
    run.begin()
    run.commit(5)
    answers: list[object] = []

    def call() -> None:
        answers.append(ensure(run.root, "checkpoint/5", timeout_s=0))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(a == answers[0] for a in answers)


def test_every_kind_of_step_is_judged(run: Run) -> None:
    run.begin()
    for kind in StepKind:
        at = kind in (StepKind.SEGMENT, StepKind.CHECKPOINT, StepKind.EVALUATION, StepKind.EXPORT)
        name = "s" if kind is StepKind.EVALUATION else None
        step = Step(kind=kind, update=3 if at else None, set_name=name)
        assert isinstance(run.onlooker.look(step), Running)
