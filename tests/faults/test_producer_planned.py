"""Faults at the producer's points, counted: every prompt still comes to one end, once."""

import random

import pytest

from runtime import faults
from runtime.data.ledger import Ledger
from runtime.faults import Fault, FaultPlan, Kind
from tests.faults.test_producer_cancelled import NUM_PROMPTS, ORDER, make_world, session

pytestmark = pytest.mark.anyio

PLANNED = [
    ("generation.request", Kind.DROP, 5),
    ("generation.answer", Kind.DROP, 5),
    ("generation.answer", Kind.HANG, 2),
    ("generation.slot", Kind.SLOW, 4),
    ("group.generated", Kind.SLOW, 4),
    ("producer.land", Kind.DUPLICATE, 8),
    ("producer.take", Kind.SLOW, 3),
    ("producer.admit", Kind.SLOW, 3),
    ("gate.enter", Kind.SLOW, 4),
]


@pytest.mark.parametrize(("point", "kind", "times"), PLANNED)
async def test_every_prompt_comes_to_one_end_under_a_counted_fault(
    tmp_path, monkeypatch, point: str, kind: Kind, times: int
) -> None:
    plan = FaultPlan(tmp_path)
    # What hangs is let go by its group's deadline, on the world's clock.
    seconds = None if kind is Kind.HANG else 0.002
    plan.arm([Fault(id="f", point=point, kind=kind, after=3, times=times, seconds=seconds)])
    monkeypatch.setattr(faults, "plan", plan)
    ledger = Ledger(ORDER)
    world = make_world(ledger, random.Random(7))
    await session(world, 0)
    assert len(plan.fired("f")) == times
    counts = ledger.counts()
    assert (counts.pending, counts.remaining, counts.lost, counts.doubled) == (0, 0, 0, 0)
    assert counts.consumed + counts.filtered + counts.skipped == NUM_PROMPTS
    ledger.check()
    assert not world.engines[0].running
    assert not world.gate.active
