import asyncio

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.rollout.slots import SampleSlots


@pytest.mark.anyio
async def test_later_turns_are_served_in_order_and_before_new_groups(settle_tasks):
    freed = []
    slots = SampleSlots(4, on_free=lambda: freed.append(slots.free))
    slots.take_now(4)
    order = []

    async def turn(name, count):
        await slots.take(count)
        order.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn, "wants three", 3)
        await settle_tasks()
        tasks.start_soon(turn, "wants one", 1)
        await settle_tasks()
        slots.give(2)
        await settle_tasks()
        assert order == [], "the second may not overtake the first"
        assert not slots.fits(1), "nor may a new group"
        slots.give(2)
        await settle_tasks()
    assert order == ["wants three", "wants one"]
    assert freed == []


@pytest.mark.anyio
async def test_a_cancelled_turn_gives_up_its_place(settle_tasks):
    slots = SampleSlots(2, on_free=lambda: None)
    slots.take_now(2)
    scope = anyio.CancelScope()

    async def cancelled():
        with scope:
            await slots.take(2)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slots.take, 1)
        tasks.start_soon(cancelled)
        await settle_tasks()
        slots.give(1)
        await settle_tasks()
        scope.cancel()
        await settle_tasks()
        slots.give(1)
    assert slots.free == 1


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "cancel"]), st.integers(1, 3))))
def test_slots_are_never_lost_or_invented(steps):
    async def play():
        slots = SampleSlots(5, on_free=lambda: None)
        held, waiting = [], []
        for step, count in steps:
            if step == "take":
                waiting.append((count, asyncio.ensure_future(slots.take(count))))
            elif step == "give" and held:
                slots.give(held.pop(0))
            elif step == "cancel" and waiting:
                waiting.pop(0)[1].cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            held += [n for n, task in waiting if task.done() and not task.cancelled()]
            waiting = [(n, task) for n, task in waiting if not task.done()]
            assert slots.used == sum(held)
            assert 0 <= slots.used <= 5
            if waiting:
                assert slots.free < waiting[0][0], "the first in line waits only when it must"
        for _, task in reversed(waiting):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert slots.used == sum(held)

    asyncio.run(play())
