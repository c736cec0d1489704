"""Collections of a producer: their order, how far it goes ahead, and how old they may be."""

import anyio
import pytest

from runtime.errors import (
    ConfigError,
    ContractViolation,
    SessionError,
    WaitTimeout,
)
from runtime.rollout.filters import equal_rewards
from tests.runtime.rollout.read_off import indices, prompt_index

pytestmark = pytest.mark.anyio


async def test_collections_come_in_order_of_prompts_until_the_data_ends(world_class):
    world = world_class(num_prompts=7)
    async with world.running():
        taken = await world.train(10)
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [c.id for c in taken] == [1, 2, 3, 4]
    counts = world.ledger.counts()
    assert (counts.consumed, counts.pending, counts.remaining) == (7, 0, 0)


async def test_uniform_sampling_sends_a_group_as_one_request_with_its_policy_as_salt(world_class):
    world = world_class()
    async with world.running(update=5):
        await world.take(5)
    first = world.engines[0].requests[0]
    assert (first.n, first.salt, first.input_ids) == (2, "e3.u5", (1, 2, 3))
    rids = [request.rid for request in world.engines[0].requests]
    assert len(set(rids)) == len(rids)


async def test_whole_groups_go_out_when_enough_sample_slots_are_free(world_class, outcome_class):
    world = world_class(samples_per_prompt=3, max_concurrent_samples=8)
    async with world.running():
        await world.time.run_for(0.1)
        assert world.producer.occupancy()["samples_in_flight"] == 6, "two slots hold no whole group"
        await world.train(3)
    assert world.engines[0].max_running_samples == 6


def test_a_bound_below_one_group_is_refused(world_class):
    with pytest.raises(ConfigError, match="no whole group of 4"):
        world_class(samples_per_prompt=4, max_concurrent_samples=3)


async def test_room_is_made_by_publication_not_by_consumption(world_class):
    world = world_class(max_staleness=1, updates_per_collection=1)
    bound = 2 * (1 + 1)
    async with world.running() as producer:
        collection = await world.take(0)
        await world.time.run_for(20)
        assert world.ledger.counts().pending == bound
        world.consume(collection, 1)
        await world.time.run_for(20)
        assert producer.occupancy()["groups_outstanding"] == bound
        assert world.ledger.counts().pending == bound - 2, "consumed, and nothing admitted for it"
        world.publish(1)
        await world.time.run_for(1)
        assert world.ledger.counts().pending == bound


@pytest.mark.parametrize(
    ("max_staleness", "updates_per_collection", "collections"),
    [(0, 1, 1), (1, 1, 2), (4, 1, 5), (4, 2, 3), (5, 2, 3), (1, 2, 1)],
)
async def test_groups_ahead_follow_from_staleness_and_updates_per_collection(
    world_class, max_staleness, updates_per_collection, collections
):
    world = world_class(
        max_staleness=max_staleness,
        updates_per_collection=updates_per_collection,
        buffer_collections=10,
    )
    async with world.running():
        await world.time.run_for(30)
    assert world.ledger.counts().pending == 2 * collections


async def test_a_full_buffer_holds_admission_back_and_drops_nothing(world_class):
    world = world_class(max_staleness=8, buffer_collections=1, max_concurrent_samples=6)
    async with world.running() as producer:
        await world.time.run_for(30)
        row = producer.occupancy()
        assert (row["groups_buffered"], row["groups_in_flight"]) == (2, 0)
        waiting = row["groups_waiting_for_room"]
        assert 1 <= waiting <= 2 + 3, "no more than finish while they are in flight"
        assert world.ledger.counts().pending == 2 + waiting
        taken = await world.train(4)
    assert [indices(c) for c in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]


async def test_the_last_collection_may_be_short_and_a_filter_may_empty_it(world_class):
    world = world_class(num_prompts=3, accept=equal_rewards)
    world.rewards.rule = lambda prompt: [1.0, 1.0] if prompt.id.index == 2 else [0.0, 1.0]
    async with world.running():
        taken = await world.train(5)
    assert [indices(c) for c in taken] == [[0, 1]]
    counts = world.ledger.counts()
    assert (counts.consumed, counts.filtered, counts.pending) == (2, 1, 0)


async def test_asking_a_producer_that_does_not_run_is_an_error(world_class):
    world = world_class()
    with pytest.raises(SessionError):
        await world.producer.take(2, world.policy(0))
    async with world.running():
        pass
    with pytest.raises(SessionError):
        await world.producer.take(2, world.policy(0))


async def test_nothing_is_admitted_before_a_policy_is_published(world_class):
    world = world_class()
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.producer.run)
        await world.time.run_for(10)
        assert world.ledger.counts().pending == 0
        await world.producer.close()


async def test_a_publication_of_another_epoch_or_of_the_past_is_refused(world_class):
    world = world_class()
    async with world.running(update=3) as producer:
        with pytest.raises(ContractViolation):
            producer.published(world.policy(2))
        with pytest.raises(ContractViolation):
            producer.published(type(world.policy(0))(world.epoch + 1, 9))


async def test_consuming_what_was_never_taken_is_a_violation(world_class):
    world = world_class()
    async with world.running() as producer:
        collection = await world.take(0)
        world.consume(collection, 1)
        with pytest.raises(ContractViolation):
            producer.consumed(collection.groups)


async def test_a_wait_without_progress_warns_and_then_says_what_it_waited_for(
    world_class, outcome_class
):
    world = world_class()
    world.behave = lambda request: outcome_class(seconds=1e6)
    warnings = []
    async with world.running() as producer:
        with pytest.raises(ExceptionGroup) as raised:
            await world.while_time_passes(
                lambda: producer.take(
                    2, world.policy(0), no_progress_s=100, on_wait=warnings.append
                )
            )
    assert raised.group_contains(WaitTimeout, match="0 finished, 10 in flight")
    assert [round(w.waited_s) for w in warnings] == [30, 60, 90]


async def test_a_group_that_grew_too_old_starts_again_and_is_then_waited_for(
    world_class, outcome_class
):
    world = world_class(max_staleness=1)
    slow = 0

    def behave(request):
        return outcome_class(seconds=5.0 if prompt_index(request) == slow else 0.5)

    world.behave = behave
    async with world.running():
        first = await world.take(0)
        assert slow not in indices(first)
        world.consume(first, 1)
        world.publish(1)
        await world.time.run_for(1)
        second = await world.take(1)
        assert slow not in indices(second), "begun at 0, it would be 2 updates old at the next take"
        await world.time.run_for(0)
        counts = world.ledger.counts()
        assert counts.requeued == 1
        world.consume(second, 2)
        world.publish(2)
        third = await world.take(2)
        assert slow in indices(third), "the second time the trainer waits"
        (group,) = [g for g in third.groups if g.prompt.id.index == slow]
        assert (group.attempt, group.oldest.update) == (2, 1)
    assert world.errors.values()["errors/completed_group_attempts"] == len(world.rewards.judged)
    assert world.errors.values()["errors/window_failed_groups"] == 0


async def test_finished_groups_that_nobody_took_in_time_are_generated_anew(world_class):
    world = world_class(max_staleness=0)
    async with world.running():
        await world.time.run_for(5)
        world.publish(1)  # an update that consumed nothing: what is buffered is too old for it
        collection = await world.take(1)
    assert indices(collection) == [0, 1]
    assert {g.attempt for g in collection.groups} == {2}
    assert {g.oldest.update for g in collection.groups} == {1}
