"""Waits and pauses: deadlines, a shut gate, a publication that aborts what runs."""

import anyio
import pytest

from tests.runtime.rollout.read_off import attempt, indices, prompt_index

pytestmark = pytest.mark.anyio


async def test_a_group_past_its_deadline_is_a_timeout_of_the_group(world_class, outcome_class):
    world = world_class(num_prompts=2, waiting_deadline_s=10, running_deadline_s=20, hold_off_s=1)
    world.behave = lambda request: outcome_class(
        seconds=1e6 if prompt_index(request) == 0 and attempt(request) == 1 else 1.0
    )
    async with world.running():
        await world.time.run_for(29)
        assert world.errors.values()["errors/timeout_groups"] == 0
        await world.time.run_for(2)
        assert world.errors.values()["errors/timeout_groups"] == 1
        assert indices(await world.take(0)) == [0, 1]


async def test_deadlines_run_only_while_the_gate_is_open(world_class, outcome_class):
    world = world_class(num_prompts=2, waiting_deadline_s=10, running_deadline_s=20)
    world.behave = lambda request: outcome_class(seconds=200.0)
    async with world.running():
        await world.time.run_for(5)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shut_for_evaluation, world.gate)
            await world.time.run_for(100)
            assert not world.gate.is_open
            assert world.errors.values()["errors/timeout_groups"] == 0
            tasks.cancel_scope.cancel()
        world.gate.open()
        await world.time.run_for(24)
        assert world.errors.values()["errors/timeout_groups"] == 0
        await world.time.run_for(2)
        assert world.errors.values()["errors/timeout_groups"] == 2


async def shut_for_evaluation(gate):
    await gate.close(drain_deadline_s=1e9, reason="evaluation")


async def test_shared_evaluation_drains_calls_but_not_rewards_and_nothing_is_resampled(world_class):
    world = world_class(max_staleness=1)
    async with world.running():
        await world.time.run_for(0.5)
        async with anyio.create_task_group() as tasks:
            opened = anyio.Event()
            tasks.start_soon(evaluate_until, world, opened)
            await world.time.run_for(5)
            row = world.producer.occupancy()
            assert row["generation_admission_paused"] == 1
            assert row["generation_active_calls"] == 0
            assert row["groups_buffered"] == 2, "finished meanwhile"
            before = len(world.engines[0].requests)
            await world.time.run_for(60)
            assert len(world.engines[0].requests) == before
            opened.set()
        taken = await world.train(3)
        assert world.ledger.counts().requeued == 0
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5]]


async def evaluate_until(world, event):
    async with world.gate.evaluation(drain_deadline_s=10, max_calls=4):
        await event.wait()


async def test_stragglers_of_a_drain_are_requeued_and_are_no_failures(world_class, outcome_class):
    world = world_class(max_staleness=0)
    world.behave = lambda request: outcome_class(
        seconds=1e6 if prompt_index(request) == 0 and attempt(request) == 1 else 1.0
    )
    async with world.running():
        await world.time.run_for(2)
        async with anyio.create_task_group() as tasks:
            opened = anyio.Event()
            tasks.start_soon(evaluate_until, world, opened)
            await world.time.run_for(9.9)
            assert len(world.engines[0].running) == 1
            await world.time.run_for(0.2)
            assert not world.engines[0].running
            await world.time.run_for(5)
            assert attempt(world.engines[0].requests[-1]) == 1, "not asked again while it is shut"
            opened.set()
        assert indices(await world.take(0)) == [0, 1]
    values = world.errors.values()
    assert (values["errors/requeued_groups"], values["errors/window_failed_groups"]) == (1, 0)


async def test_a_response_aborted_by_a_publication_goes_on_at_the_new_policy(
    world_class, outcome_class
):
    world = world_class(num_prompts=2, max_concurrent_samples=4)
    world.behave = lambda request: outcome_class(seconds=10.0)
    async with world.running() as producer:
        await world.time.run_for(1)
        world.engines[0].abort_all()
        await world.time.run_for(1)
        assert len(world.engines[0].requests) == 2, "nothing goes on before the publication"
        assert producer.occupancy()["samples_in_flight"] == 4, "the permits are kept"
        world.publish(1)
        collection = await world.take(1)
    continued = world.engines[0].requests[2:]
    assert [r.n for r in continued] == [1, 1, 1, 1]
    assert {r.input_ids for r in continued} == {(1, 2, 3, 0)}, "prompt and partial response"
    assert {r.sampling.max_new_tokens for r in continued} == {7}
    assert {r.salt for r in continued} == {"e3.u1"}
    for group in collection.groups:
        assert group.attempt == 1
        for sample in group.samples:
            assert [(s.start, s.end, s.policy.update) for s in sample.spans] == [
                (0, 1, 0), (1, 3, 1),
            ]  # fmt: skip
            assert sample.prefill.update == 0
    assert world.ledger.counts().requeued == 0
