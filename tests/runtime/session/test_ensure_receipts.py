"""Receipts: what proves a step done, from run directories made by hand."""

from runtime.evaluation.files import claim_try, finish_try, write_request
from runtime.evaluation.records import Request, Result, TryError
from runtime.policy import PolicyId
from runtime.rundir import workflow
from runtime.rundir.layout import EXPORT_RECEIPT
from runtime.rundir.receipts import Receipt, write_receipt
from runtime.session.answers import Done, Ended, Running
from tests.runtime.session.written_run import Run, put


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
