"""The monitor at work while one engine after the other gets its weights: real pool and monitor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from runtime.clock import SystemClock
from runtime.engines.health import DETECT_SLACK_S, HealthSettings
from runtime.engines.slots import SlotState
from runtime.errors import PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.protocol import Target
from runtime.rollout.gate import AdmissionGate
from runtime.session.publishing import Publishing
from runtime.telemetry.events import Event
from tests.runtime.engines.test_monitor import House

pytestmark = pytest.mark.anyio
NEXT = PolicyId(1, 1)
DETECT_S = HealthSettings().interval_s * HealthSettings().misses + DETECT_SLACK_S
TURN_S = 60.0
"""Longer than a hang may go unnoticed."""


class OneByOne:
    """Keeps of the real publisher: turns in order of slots; each begins with ``rest``."""

    brings_up_one = True
    is_halted = False

    def __init__(self, house: House) -> None:
        self.house = house
        self.turn: int | None = None
        self.fails_at: int | None = None

    async def publish(self, policy: PolicyId, targets: Sequence[Target], **calls: Any) -> Any:
        for target in targets:
            await calls["rest"](target)
            self.turn = target.slot
            await self.house.time.sleep(TURN_S)
            if self.turn == self.fails_at:
                raise PublicationFailed("the first engine was not verified")
            calls["decided"](policy, [target])
        self.turn = None
        return SimpleNamespace(verified=[], pause_s=0.0, num_bytes=0, stages_s={})


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


async def rolling(tasks: TaskGroup) -> tuple[House, OneByOne, Publishing]:
    house = House(engines=3)
    await house.up(tasks)
    publisher = OneByOne(house)
    publishing = Publishing(
        publisher=publisher,  # type: ignore[arg-type]
        pool=house.pool,
        monitor=house.monitor,
        gate=AdmissionGate(clock=SystemClock()),
        mode="rolling",
        drain_deadline_s=5.0,
        lifecycle=SimpleNamespace(record=lambda *_, **__: None),  # type: ignore[arg-type]
    )
    return house, publisher, publishing


def died(house: House) -> list[int]:
    return [slot for event, slot in house.events if event is Event.ENGINE_DIED]


async def test_engines_without_a_turn_are_found_when_they_hang_or_end(tasks: TaskGroup) -> None:
    house, publisher, publishing = await rolling(tasks)
    tasks.start_soon(publishing.publish, NEXT)
    await house.time.run_for(2)
    house.server(0).mode = "hung"  # for its weights: it need not answer
    house.server(1).exists = False
    house.server(2).mode = "hung"
    await house.time.run_for(2)
    assert died(house) == [1]
    await house.time.run_for(DETECT_S)
    assert (publisher.turn, died(house)) == (0, [1, 2])
    assert house.state(0) is SlotState.HEALTHY


async def test_who_had_its_turn_is_watched_again_and_who_has_it_is_not(tasks: TaskGroup) -> None:
    house, publisher, publishing = await rolling(tasks)
    tasks.start_soon(publishing.publish, NEXT)
    await house.time.run_for(TURN_S + 1)
    assert publisher.turn == 1
    house.server(0).mode = house.server(1).mode = "hung"
    await house.time.run_for(DETECT_S + 5)
    assert (publisher.turn, died(house)) == (1, [0])
    house.server(1).mode = "well"
    await house.time.run_for(2 * TURN_S)
    assert publisher.turn is None
    house.server(1).mode = house.server(2).mode = "hung"
    await house.time.run_for(DETECT_S + 5)
    assert sorted(died(house)) == [0, 1, 2]


async def test_after_a_roll_that_failed_every_engine_is_watched(tasks: TaskGroup) -> None:
    house, publisher, publishing = await rolling(tasks)
    publisher.fails_at = 0
    failures: list[Exception] = []

    async def publish() -> None:
        try:
            await publishing.publish(NEXT)
        except PublicationFailed as error:
            failures.append(error)

    tasks.start_soon(publish)
    await house.time.run_for(TURN_S + 5)
    assert (len(failures), died(house)) == (1, [])
    for slot in range(3):
        house.server(slot).mode = "hung"
    await house.time.run_for(DETECT_S + 5)
    assert sorted(died(house)) == [0, 1, 2]
