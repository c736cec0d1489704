"""The session is cancelled after the k-th step of its event loop, for many k; nothing is lost."""

import asyncio
import random

import anyio
import pytest

from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import OverloadError, SessionError, VerifierCrashed
from runtime.rollout.filters import equal_rewards
from tests.runtime.rollout.world import Outcome, World

NUM_PROMPTS = 24
ORDER = PromptOrder(NUM_PROMPTS, shuffle=True, seed=5)


def make_world(ledger, rng):
    """A world in which everything happens: errors, data failures, filters, long responses."""
    world = World(ledger=ledger, accept=equal_rewards, budget=1000, max_staleness=1)

    def behave(request):
        error = OverloadError("full") if rng.random() < 0.15 else None
        return Outcome(seconds=rng.choice([0.1, 0.2, 0.4, 3.0]), error=error)

    def judge(prompt):
        draw = rng.random()
        return VerifierCrashed("boom") if draw < 0.05 else [0.0, float(draw < 0.8)]

    world.behave = behave
    world.rewards.rule = judge
    return world


async def session(world, update):
    """Produce and train to the end of the data; the clock moves with every step of the loop."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick, world)
        await tasks.start(world.producer.run)
        world.publish(update)
        while True:
            group_count = world.settings.groups_per_collection
            collection = await world.producer.take(group_count, world.policy(update))
            if collection is None:
                break
            await anyio.lowlevel.checkpoint()
            update += 1
            world.consume(collection, update)
            await anyio.lowlevel.checkpoint()
            world.publish(update)
        await world.producer.close()
        tasks.cancel_scope.cancel()


async def tick(world):
    while True:
        await asyncio.sleep(0)
        world.time.step(0.02)


async def cancelled_after(steps, world, update):
    task = asyncio.ensure_future(session(world, update))
    for _ in range(steps):
        await asyncio.sleep(0)
        if task.done():
            break
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.anyio
async def test_every_prompt_comes_to_one_end_whenever_sessions_are_cancelled(seed):
    rng = random.Random(seed)
    ended_early = 0
    for steps in range(1, 600, 13):
        ledger = Ledger(ORDER)
        update = 0
        for _ in range(2):
            world = make_world(ledger, rng)
            await cancelled_after(steps, world, update)
            ledger.check()
            assert ledger.counts().in_flight == 0
            assert not world.engines[0].running
            assert not world.gate.active
            ended_early += ledger.counts().remaining > 0
            # What a commit at this moment would hold is all that the next session knows.
            segment = ledger.snapshot()
            update = max(0, segment.last_update)
            ledger = Ledger.restore([segment], ORDER)
        world = make_world(ledger, rng)
        await session(world, update)
        counts = ledger.counts()
        ends = counts.consumed + counts.filtered + counts.skipped
        assert (ends, counts.pending, counts.remaining) == (NUM_PROMPTS, 0, 0)
        assert (counts.lost, counts.doubled) == (0, 0)
        ledger.check()
    assert ended_early > 20, "the cancellations must fall into the middle of things"


@pytest.mark.parametrize("steps", [15, 40, 90])
@pytest.mark.anyio
async def test_a_foreign_cancellation_of_one_group_ends_the_producer_loudly(steps):
    """Somebody cancels a task that is not theirs: no silence, and the prompt is not lost."""

    world = make_world(Ledger(ORDER), random.Random(1))
    world.behave = lambda request: Outcome(seconds=2.0)
    task = asyncio.ensure_future(session(world, 0))
    for _ in range(steps):
        await asyncio.sleep(0)
    groups = [t for t in asyncio.all_tasks() if t.get_name().startswith("group ")]
    assert groups, "a group is under way"
    groups[0].cancel()
    with pytest.raises(ExceptionGroup) as raised:
        await task
    assert raised.group_contains(SessionError, match="cancelled by nobody")
    world.ledger.check()
    assert world.ledger.counts().in_flight == 0
