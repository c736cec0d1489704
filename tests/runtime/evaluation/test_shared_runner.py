from pathlib import Path

import anyio
import pytest

from runtime.errors import (
    ContractViolation,
    DiskFull,
    EvaluationFailed,
    OverloadError,
    TransportError,
    VerifierCrashed,
)
from runtime.policy import PolicyId
from runtime.rundir import atomic
from tests.runtime.evaluation.asked import Asked

pytestmark = pytest.mark.anyio


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


async def test_every_prompt_is_asked_once_and_the_gate_opens_again(asked: Asked) -> None:
    metrics = await asked.run()
    assert asked.engine.calls == dict.fromkeys(range(6), 1)
    assert metrics["mean"] == pytest.approx(0.5)
    assert asked.gate.is_open
    assert asked.pool.views()[0].active_samples == 0
    assert {r.salt for r in asked.engine.requests} == {"e1.u4"}


async def test_an_item_is_asked_up_to_three_more_times(asked: Asked) -> None:
    asked.engine.fail = lambda row, call: (
        TransportError("connection lost") if row == 2 and call < 3 else None
    )
    await asked.run()
    assert asked.engine.calls[2] == 4
    assert sum(asked.engine.calls.values()) == 9
    rids = [r.rid for r in asked.engine.requests]
    assert len(set(rids)) == len(rids)


async def test_a_fourth_failure_fails_the_evaluation_with_counts(asked: Asked) -> None:
    errors = {1: TransportError("connection lost"), 4: OverloadError("queue full")}
    asked.engine.fail = lambda row, call: errors.get(row)
    with pytest.raises(EvaluationFailed) as failed:
        await asked.run()
    assert failed.value.detail["done"] == 4
    assert failed.value.detail["failed"] == 2
    assert failed.value.detail["untried"] == 0
    assert failed.value.detail["TransportError"] == failed.value.detail["OverloadError"] == 1
    assert not asked.gate.is_open
    assert asked.pool.views()[0].active_samples == 0


async def test_the_next_try_repeats_no_item_and_opens_the_gate(asked: Asked) -> None:
    asked.engine.fail = lambda row, call: TransportError("lost") if row == 5 else None
    with pytest.raises(EvaluationFailed):
        await asked.run()
    asked.engine.fail = lambda row, call: None
    asked.engine.calls.clear()
    metrics = await asked.run()
    assert asked.engine.calls == {5: 1}
    assert metrics["mean"] == pytest.approx(0.5)
    assert asked.gate.is_open


async def test_nobody_else_gets_in_between_failure_and_retry(asked: Asked) -> None:
    asked.engine.fail = lambda row, call: TransportError("lost")
    with pytest.raises(EvaluationFailed):
        await asked.run()
    entered: list[object] = []
    async with anyio.create_task_group() as tasks:

        async def train() -> None:
            entered.append(await asked.gate.enter(lambda: None))

        tasks.start_soon(train)
        await anyio.wait_all_tasks_blocked()
        assert entered == []
        asked.engine.fail = lambda row, call: None
        await asked.run()
    assert len(entered) == 1


async def test_a_verifier_that_crashes_makes_an_item_missing_and_never_a_zero(
    tmp_path: Path,
) -> None:
    asked = Asked(tmp_path, skip_share=0.2)
    asked.verifier.fail = lambda row: VerifierCrashed("died twice") if row == 0 else None
    metrics = await asked.run()
    # Rows 2 and 4 of 1..5 are right: a zero for row 0 would make this 2 of 6.
    assert metrics["mean"] == pytest.approx(2 / 5)
    assert metrics["num_missing"] == 1
    assert asked.log.read()[0].samples == ()


async def test_more_missing_than_the_budget_fails_and_is_asked_again(tmp_path: Path) -> None:
    asked = Asked(tmp_path, skip_share=0.2)
    asked.verifier.fail = lambda row: VerifierCrashed("died twice") if row in (1, 3) else None
    with pytest.raises(EvaluationFailed, match="2 items could not be judged"):
        await asked.run()
    assert not asked.gate.is_open
    asked.verifier.fail = lambda row: None
    asked.engine.calls.clear()
    metrics = await asked.run()
    assert asked.engine.calls == {1: 1, 3: 1}
    assert (metrics["mean"], metrics["num_missing"]) == (pytest.approx(0.5), 0)


async def test_the_deadline_bounds_everything_and_keeps_what_is_done(tmp_path: Path) -> None:
    asked = Asked(tmp_path, deadline_s=0.5)
    asked.engine.hangs_at = {3}
    with pytest.raises(EvaluationFailed, match=r"not done within 0\.5 s") as failed:
        await asked.run()
    assert failed.value.detail["done"] == 5
    assert failed.value.detail["untried"] == 1
    assert not asked.gate.is_open
    assert asked.pool.views()[0].active_samples == 0


async def test_cancelling_it_leaves_the_gate_shut_and_no_sample_counted(asked: Asked) -> None:
    asked.engine.hangs_at = {0}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asked.run)
        await asked.engine.reached.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert not asked.gate.is_open
    assert asked.pool.views()[0].active_samples == 0
    assert sorted(asked.log.read()) == [1, 2, 3, 4, 5]


async def test_an_engine_at_another_policy_answers_for_nobody(asked: Asked) -> None:
    asked.pool.serve(PolicyId(1, 5))
    asked.pool.mark_verified(0, "a", PolicyId(1, 5))
    with pytest.raises(EvaluationFailed) as failed:
        await asked.run()
    assert failed.value.detail["UnavailableError"] == 6
    assert asked.engine.requests == []


async def test_a_broken_contract_ends_it_at_once(asked: Asked) -> None:
    asked.engine.fail = lambda row, call: ContractViolation("a bare 503") if row == 1 else None
    with pytest.raises(ContractViolation):
        await asked.run()


async def test_a_full_disk_is_the_error_itself(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(operation: str, path: Path) -> None:
        if operation == "append":
            raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic, "probe", full)
    with pytest.raises(DiskFull):
        await asked.run()
    monkeypatch.setattr(atomic, "probe", None)
    await asked.run()
    assert asked.gate.is_open


async def test_sampled_items_have_the_same_seeds_every_time(tmp_path: Path) -> None:
    seeds = []
    for name in ("first", "again"):
        asked = Asked(tmp_path / name, num_prompts=3)
        asked.with_samples(4, temperature=1.0)
        await asked.run()
        seeds.append(sorted((r.input_ids, r.sampling.seed) for r in asked.engine.requests))
        assert {r.n for r in asked.engine.requests} == {1}
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12
