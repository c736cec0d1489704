"""Held, with the real gate, pool and monitor: nothing admitted, and a retry that can succeed."""

from types import SimpleNamespace

import pytest

from runtime.clock import ManualClock
from runtime.engines.health import HealthSettings
from runtime.engines.monitor import HealthMonitor
from runtime.engines.pool import EnginePool
from runtime.engines.slots import SlotState
from runtime.rollout.gate import AdmissionGate
from runtime.session.holding import ServingHold
from runtime.telemetry.events import Event


class Held:
    def __init__(self) -> None:
        clock = ManualClock()
        self.gate = AdmissionGate(clock=clock)
        self.events: list[Event] = []
        self.gate.listen(lambda event, _fields: self.events.append(event))
        pool = EnginePool(1, clock=clock)
        self.monitor = HealthMonitor(
            pool,
            {0: SimpleNamespace()},  # type: ignore[dict-item]
            HealthSettings(restarts_per_hour=0),
            connect=lambda _: None,  # type: ignore[arg-type,return-value]
            clock=clock,
        )
        pool.start_failed(0, "never came up")
        assert pool.state(0) is SlotState.DEAD
        self.it = ServingHold(gate=self.gate, monitor=self.monitor)


def test_the_gate_is_shut_for_as_long_as_it_is_held() -> None:
    held = Held()
    held.it.begin()
    assert not held.gate.is_open
    held.it.asked()
    held.it.begin()
    held.it.asked()
    assert not held.gate.is_open, "the try may fail again"
    held.it.end()
    assert held.gate.is_open
    assert held.events == [Event.GENERATION_PAUSED, Event.GENERATION_RESUMED]


@pytest.mark.anyio
async def test_a_gate_that_was_shut_before_is_not_the_holds_to_open() -> None:
    held = Held()
    await held.gate.close(drain_deadline_s=1.0, reason="evaluation")
    held.it.begin()
    held.it.asked()
    held.it.end()
    assert not held.gate.is_open
