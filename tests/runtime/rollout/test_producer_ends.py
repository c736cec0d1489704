"""What ends a producer: filters that starve, data that fails, closing, cancellation, defects."""

from dataclasses import replace

import anyio
import pytest

from runtime.data.samples import PromptId
from runtime.errors import (
    ContractViolation,
    DataBudgetExceeded,
    FilterStarved,
    SessionError,
    VerifierCrashed,
)
from runtime.rollout.filters import equal_rewards
from tests.runtime.rollout.read_off import indices, prompt_index

pytestmark = pytest.mark.anyio


async def test_a_filter_that_lets_nothing_through_ends_with_its_statistics(world_class):
    world = world_class(accept=equal_rewards, filter_max_rounds=3)
    world.rewards.rule = lambda prompt: [0.25, 0.25]
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(FilterStarved, match=r"rejected 7 of 7 .*mean reward 0.25")
    assert world.ledger.counts().filtered == 6, "the seventh is pending: nothing was decided on it"


async def test_rejections_are_counted_for_each_collection_anew(world_class):
    world = world_class(accept=equal_rewards, filter_max_rounds=2, num_prompts=40)
    world.rewards.rule = lambda prompt: [0.0, 0.0] if prompt.id.index % 2 else [0.0, 1.0]
    async with world.running():
        taken = await world.train(10)
    assert len(taken) == 10
    counts = world.ledger.counts()
    assert (counts.consumed, counts.filtered) == (20, 20)
    values = world.errors.values()
    assert values["errors/completed_group_attempts"] == 40, "successes count before filters"
    assert values["errors/window_failed_groups"] == 0


async def test_a_data_failure_within_the_budget_skips_the_prompt_and_is_no_serving_error(
    world_class,
):
    world = world_class(num_prompts=4, budget=1)
    world.rewards.rule = lambda prompt: VerifierCrashed("boom") if prompt.id.index == 1 else []
    async with world.running():
        taken = await world.train(4)
    assert [indices(c) for c in taken] == [[0, 2], [3]]
    counts = world.ledger.counts()
    assert (counts.skipped, counts.consumed, counts.requeued) == (1, 3, 0)
    assert world.errors.values()["errors/window_failed_groups"] == 0
    assert world.budget.charged == [PromptId(0, 1)]


async def test_a_data_failure_past_the_budget_ends_the_run(world_class):
    world = world_class(budget=0)
    world.rewards.rule = lambda prompt: VerifierCrashed("boom")
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(DataBudgetExceeded)
    world.ledger.check()
    assert world.ledger.counts().skipped == 0


async def test_rewards_that_are_no_numbers_are_a_contract_violation(world_class):
    world = world_class()
    world.rewards.rule = lambda prompt: [float("nan"), 1.0]
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ContractViolation, match="judged as")


async def test_closing_cancels_joins_and_requeues_what_is_in_flight(world_class, outcome_class):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=1e6)
    async with world.running():
        await world.time.run_for(1)
        assert world.ledger.counts().in_flight == 10
    counts = world.ledger.counts()
    assert (counts.in_flight, counts.queued, counts.pending) == (0, 10, 10)
    assert not world.engines[0].running
    assert world.errors.values()["errors/fatal"] == 0
    assert world.rows[-1]["kind"] == "summary"


async def test_cancellation_from_outside_is_a_clean_stop(world_class):
    world = world_class()
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.producer.run)
        world.publish(0)
        await world.time.run_for(0.5)
        tasks.cancel_scope.cancel()
    assert world.errors.values()["errors/fatal"] == 0
    world.ledger.check()
    assert world.ledger.counts().in_flight == 0


async def test_a_cancellation_that_leaks_out_of_a_library_is_fatal_not_silent(
    world_class, outcome_class
):
    world = world_class()

    leak = anyio.get_cancelled_exc_class()
    world.behave = lambda request: outcome_class(
        seconds=0.1, error=leak() if prompt_index(request) == 2 else None
    )
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.train(5)
    assert raised.group_contains(SessionError, match="cancelled by nobody")
    assert world.ledger.counts().in_flight == 0


async def test_a_defect_in_the_prompt_source_is_fatal(world_class, monkeypatch):
    world = world_class()

    def broken(index):
        raise KeyError(index)

    parts = replace(world.producer._parts, prompt=broken)
    monkeypatch.setattr(world.producer, "_parts", parts)
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(KeyError)
