import json
from pathlib import Path
from typing import Any

import pytest

from runtime.clock import ManualClock
from runtime.errors import EvaluationFailed, PartialWrite, RunError, TransportError
from runtime.evaluation.evaluator import Evaluator
from runtime.evaluation.opening import Asker
from runtime.evaluation.reading import standing_result
from runtime.evaluation.receipts import derive
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, EpochRecord
from runtime.telemetry.events import Event
from runtime.telemetry.protocol import Axis
from tests.runtime.evaluation.asked import POLICY, Asked

pytestmark = pytest.mark.anyio


class Told:
    """Metrics and lifecycle, kept."""

    def __init__(self) -> None:
        self.rows: list[tuple[Axis, float, dict[str, Any]]] = []
        self.events: list[Event] = []

    def log(self, axis: Axis, step: float, values: Any) -> None:
        self.rows.append((axis, step, dict(values)))

    def record(self, event: Event, **fields: object) -> None:
        self.events.append(event)

    def finish(self) -> None:
        pass


class Evaluating:
    def __init__(self, folder: Path) -> None:
        self.root = RunRoot(folder / "run")
        self.root.create()
        self.asked = Asked(folder)
        self.told = Told()
        clock = ManualClock()
        self.evaluator = Evaluator(
            root=self.root,
            sets={"held": self.asked.frozen},
            asker=Asker(run="test", attempt=1, epoch=1, clock=clock),
            runner=self.asked.runner,
            metrics=self.told,
            lifecycle=self.told,  # type: ignore[arg-type]
            clock=clock,
        )

    def own(self, *, restored: str | None = None, seq: int | None = None) -> None:
        chain = Chain(self.root)
        epochs = [r for r in chain.read() if isinstance(r, EpochRecord)]
        chain.append(
            EpochRecord(
                epoch=len(epochs) + 1, time=0.0, attempt=1, host="h", pid=1, boot_id="b",
                started=0.0, reason="test", restored=restored, restored_seq=seq,
                lease_s=None if epochs else 30.0,
            )
        )  # fmt: skip

    def commit(self, epoch: int, update: int) -> int:
        chain = Chain(self.root)
        chain.read()
        return chain.append(
            CommitRecord(
                epoch=epoch, time=0.0, format_version=1, update=update,
                policy=f"e{epoch}.u{update}", training_digest="t", layout={},
                data_fingerprint="d", ledger_checksum="l", consumed_digest="c",
                folder=f"checkpoints/{update:06d}-e{epoch}", files=(),
            )
        ).seq  # fmt: skip

    def become(self, policy: PolicyId) -> None:
        self.asked.pool.mark_verified(0, "a", policy)
        self.asked.pool.serve(policy)

    def receipt(self, policy: PolicyId = POLICY) -> Any:
        receipt = derive(self.root.evaluation(str(policy), "held"), stands=True)
        assert receipt is not None
        return receipt


@pytest.fixture
def evaluating(tmp_path: Path) -> Evaluating:
    made = Evaluating(tmp_path)
    made.own()
    return made


def lost(row: int, call: int) -> RunError | None:
    return TransportError("connection lost") if row == 2 else None


async def test_a_result_is_kept_with_all_that_was_asked(evaluating: Evaluating) -> None:
    metrics = await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    receipt = evaluating.receipt()
    assert receipt.state == "succeeded"
    assert receipt.result.metrics == metrics
    assert receipt.request.required is False
    items = evaluating.root.path / receipt.result.items
    assert len([json.loads(line) for line in items.read_text().splitlines()]) == 6
    ((axis, step, row),) = evaluating.told.rows
    assert (axis, step) == (Axis.EVALUATION, 4)
    assert row["evaluation/held/mean"] == metrics["mean"]
    assert evaluating.told.events == [Event.EVALUATION_STARTED, Event.EVALUATION_FINISHED]


async def test_a_result_at_an_update_is_never_made_twice_over_epochs(
    evaluating: Evaluating,
) -> None:
    first = await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    seq = evaluating.commit(1, 4)
    evaluating.own(restored="e1.u4", seq=seq)
    evaluating.become(PolicyId(2, 4))
    again = await evaluating.evaluator.evaluate("held", PolicyId(2, 4), kind="final")
    assert again == first
    assert sum(evaluating.asked.engine.calls.values()) == 6
    assert not evaluating.root.evaluation("e2.u4", "held").exists()
    # The row of the first epoch may have died with its session: told again, and the same.
    made, repeated = evaluating.told.rows
    assert repeated == made


async def test_a_rewind_below_it_makes_it_anew(evaluating: Evaluating) -> None:
    await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    seq = evaluating.commit(1, 2)
    evaluating.own(restored="e1.u2", seq=seq)
    policy = PolicyId(2, 4)
    evaluating.become(policy)
    await evaluating.evaluator.evaluate("held", policy, kind="cadence")
    assert sum(evaluating.asked.engine.calls.values()) == 12
    found = standing_result(
        evaluating.root, Chain(evaluating.root).read(), update=4, set_name="held"
    )
    assert found is not None
    assert found[0] == evaluating.root.evaluation("e2.u4", "held")


async def test_a_damaged_result_of_an_older_epoch_is_made_anew_and_ones_own_is_told(
    evaluating: Evaluating,
) -> None:
    await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    seq = evaluating.commit(1, 4)
    own = evaluating.root.evaluation("e1.u4", "held") / "tries" / "0" / "result.json"
    own.write_text("{")
    with pytest.raises(PartialWrite, match="move it aside"):
        await evaluating.evaluator.evaluate("held", POLICY, kind="final")
    evaluating.own(restored="e1.u4", seq=seq)
    evaluating.become(PolicyId(2, 4))
    await evaluating.evaluator.evaluate("held", PolicyId(2, 4), kind="final")
    assert sum(evaluating.asked.engine.calls.values()) == 12
    # A result that stands is one, whatever lies beside it.
    seq = evaluating.commit(2, 4)
    evaluating.own(restored="e2.u4", seq=seq)
    evaluating.become(PolicyId(3, 4))
    await evaluating.evaluator.evaluate("held", PolicyId(3, 4), kind="final")
    assert sum(evaluating.asked.engine.calls.values()) == 12


async def test_a_failed_try_is_recorded_and_the_next_goes_on(evaluating: Evaluating) -> None:
    evaluating.asked.engine.fail = lost
    with pytest.raises(EvaluationFailed):
        await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    failed = evaluating.receipt()
    assert (failed.state, len(failed.tries)) == ("failed", 1)
    assert failed.error.counts["failed"] == 1
    assert failed.error.counts["done"] == 5
    assert evaluating.told.rows == []
    evaluating.asked.engine.fail = lambda row, call: None
    evaluating.asked.engine.calls.clear()
    await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    assert evaluating.asked.engine.calls == {2: 1}
    assert [t.result.state for t in evaluating.receipt().tries] == ["failed", "succeeded"]


async def test_a_final_evaluation_that_fails_stays_outstanding_and_raises_nothing(
    evaluating: Evaluating,
) -> None:
    evaluating.asked.engine.fail = lost
    await evaluating.evaluator.final(POLICY, retries=2, backoff_s=0.0)
    assert evaluating.evaluator.outstanding == ["evaluation/4/held"]
    receipt = evaluating.receipt()
    assert (receipt.state, len(receipt.tries)) == ("failed", 3)
    assert receipt.request.required is True


async def test_a_final_evaluation_finds_the_cadence_result(evaluating: Evaluating) -> None:
    await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    await evaluating.evaluator.final(POLICY, retries=2, backoff_s=0.0)
    assert evaluating.evaluator.outstanding == []
    assert sum(evaluating.asked.engine.calls.values()) == 6


async def test_a_failed_cadence_evaluation_is_made_good_by_the_final_one(
    evaluating: Evaluating,
) -> None:
    evaluating.asked.engine.fail = lost
    with pytest.raises(EvaluationFailed):
        await evaluating.evaluator.evaluate("held", POLICY, kind="cadence")
    evaluating.asked.engine.fail = lambda row, call: None
    await evaluating.evaluator.final(POLICY, retries=0, backoff_s=0.0)
    assert evaluating.evaluator.outstanding == []
    assert evaluating.receipt().state == "succeeded"
