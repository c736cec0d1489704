"""Serving errors: the prompt goes back pristine, the attempt is thrown away, or the run ends."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from runtime.errors import (
    ContractViolation,
    OverloadError,
    ServingStopped,
    TransportError,
)
from runtime.rollout.functions import SingleTurn
from tests.runtime.rollout.read_off import attempt, indices, prompt_index

pytestmark = pytest.mark.anyio


async def test_a_serving_error_sends_the_pristine_prompt_back_and_holds_admission_off(
    world_class, outcome_class
):
    world = world_class(num_prompts=4, max_concurrent_samples=4)
    failed = []

    def behave(request):
        if prompt_index(request) == 1 and not failed:
            failed.append(world.time.monotonic())
            return outcome_class(seconds=0.3, error=TransportError("reset"))
        return outcome_class(seconds=0.5)

    world.behave = behave
    async with world.running():
        await world.time.run_for(0.4)
        assert world.producer.occupancy()["groups_in_flight"] == 1
        await world.time.run_for(0.85)
        assert len(world.engines[0].requests) == 2, "nothing new within a second of the failure"
        taken = await world.train(2)
    assert sorted(i for c in taken for i in indices(c)) == [0, 1, 2, 3]
    again = world.engines[0].requests[2]
    assert (prompt_index(again), attempt(again)) == (1, 2)
    assert world.ledger.counts().requeued == 1


async def test_siblings_are_cancelled_and_joined_and_all_of_the_attempt_is_thrown_away(
    world_class, outcome_class
):
    world = world_class(num_prompts=1, groups_per_collection=1, samples_per_prompt=3, seed=7)
    outcomes = {1: [0.1, 0.2, 50.0], 2: [0.1, 0.1, 0.1]}

    def behave(request):
        seconds = outcomes[attempt(request)].pop(0)
        is_lost = attempt(request) == 1 and seconds == 0.2
        return outcome_class(seconds=seconds, error=OverloadError("full") if is_lost else None)

    world.behave = behave
    with capture_logs() as rows:
        async with world.running():
            await world.time.run_for(0.3)
            assert not world.engines[0].running, "the third request was cancelled and is gone"
            assert world.engines[0].requests[0].n == 1
            collection = await world.take(0)
    assert "group.unjoined" not in {row["event"] for row in rows}
    (group,) = collection.groups
    assert (group.attempt, len(group.samples)) == (2, 3)
    assert len({r.sampling.seed for r in world.engines[0].requests}) == 3, "one seed per sample"


class LeavesOneBehind:
    """A rollout function with the defect its contract names: it does not join what it began."""

    def __init__(self, decode):
        self.decode = decode
        self.left = []

    async def __call__(self, task, generate):
        async def alone():
            with suppress(asyncio.CancelledError):
                await generate(task.prompt.token_ids, task.sampling)

        self.left.append(asyncio.ensure_future(alone()))
        return await SingleTurn(decode=self.decode)(task, generate)


async def test_an_attempt_that_is_settled_with_a_request_still_out_is_told(
    world_class, outcome_class
):
    world = world_class(num_prompts=1, groups_per_collection=1)
    function = LeavesOneBehind(str)
    world.producer._parts = replace(world.producer._parts, function=function)
    world.behave = lambda request: outcome_class(seconds=9.0 if request.n == 1 else 0.5)
    with capture_logs() as rows:
        async with world.running():
            await world.take(0)
            assert [r.n for r in world.engines[0].requests] == [2, 1]
            await world.time.run_for(20.0)
            await asyncio.gather(*function.left)
    told = [row for row in rows if row["event"] == "group.unjoined"]
    assert [(row["attempt"], row["requests"]) for row in told] == [(1, 1)]


async def test_the_stop_rule_ends_the_run_and_the_wait_of_the_trainer(world_class, outcome_class):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=0.1, error=OverloadError("queue full"))
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ServingStopped, match="of the last 5 minutes failed")
    assert 300 <= world.time.monotonic() - 1000 < 310
    assert world.rows[-1]["kind"] == "summary"
    assert world.rows[-1]["error"] == "ServingStopped"
    assert world.series[-1]["errors/fatal"] == 1


async def test_without_an_engine_one_attempt_a_second_fails_as_unavailable(world_class):
    world = world_class()
    async with world.running():
        world.pool.mark_dead(0, "a", "gone")
        await world.time.run_for(10)
        unavailable = world.errors.values()["errors/unavailable_groups"]
        assert 5 <= unavailable <= 11
        world.join(0, "b")
        world.publish(1)
        assert await world.take(1) is not None


async def test_requests_of_a_dead_engine_are_given_up_at_once_and_its_groups_requeued(
    world_class, outcome_class
):
    world = world_class(engines=2, max_concurrent_samples=8)
    world.behave = lambda request: outcome_class(seconds=1e6)
    async with world.running() as producer:
        await world.time.run_for(1)
        assert [len(e.requests) for e in world.engines] == [2, 2], "least loaded first"
        world.pool.mark_dead(1, "a", "three probes missed")
        await world.time.run_for(0)
        assert not world.engines[1].running
        assert world.errors.values()["errors/transport_groups"] == 2
        assert producer.occupancy()["groups_in_flight"] == 2, "the others go on"
        await world.time.run_for(2)
        assert [len(e.running) for e in world.engines] == [4, 0]


@pytest.mark.parametrize("error", [ContractViolation("spans"), RuntimeError("unknown")])
async def test_anything_else_is_fatal_and_nothing_is_lost(world_class, outcome_class, error):
    world = world_class()
    world.behave = lambda request: outcome_class(
        seconds=1.0, error=error if prompt_index(request) == 3 else None
    )
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.train(10)
    assert raised.group_contains(type(error))
    world.ledger.check()
    assert world.ledger.counts().in_flight == 0


async def test_samples_outside_the_vocabulary_are_a_contract_violation(world_class):
    world = world_class(vocab_size=1)
    with pytest.raises(ExceptionGroup) as raised:
        async with world.running():
            await world.take(0)
    assert raised.group_contains(ContractViolation, match="in \\[0, 1\\)")


async def test_weights_older_than_the_verified_policy_are_a_contract_violation(world_class):
    world = world_class()

    async def serve_old_weights():
        async with world.running(update=4):
            world.engines[0].held = world.policy(3)
            await world.train(5, start=4)

    with pytest.raises(ExceptionGroup) as raised:
        await serve_old_weights()
    assert raised.group_contains(ContractViolation, match="older than e3.u4")
