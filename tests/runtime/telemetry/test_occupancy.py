import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runtime.clock import ManualClock
from runtime.telemetry.occupancy import OccupancySampler
from runtime.telemetry.rows import Owner, RowWriter


class Kept(RowWriter):
    """Keeps rows in memory; encodes them as the real one does."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(Path("unused"), Owner(attempt=1, epoch=1), clock=clock)

    def rows(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._lines]


@given(st.lists(st.floats(0.01, 7.0), min_size=1, max_size=60))
def test_samples_cover_time_once_and_late_ones_leave_a_gap(steps: list[float]) -> None:
    clock = ManualClock()
    kept = Kept(clock)
    sampler = OccupancySampler(kept, lambda: {"x": 1}, clock=clock, interval_s=1.0)
    sampler.tick()
    for step in steps:
        clock.advance(step)
        sampler.tick()
    rows = kept.rows()
    elapsed = sum(steps)
    assert sum(float(str(row["covered_s"])) for row in rows) <= elapsed + 1e-3
    assert all(0 <= float(str(row["covered_s"])) <= 1.0 for row in rows)
    # Every sampling time passed is either a row or counted as missed.
    assert len(rows) + sampler.missed == int(elapsed + 1e-9) + 1


def test_a_late_sample_does_not_shift_the_next() -> None:
    clock = ManualClock()
    kept = Kept(clock)
    sampler = OccupancySampler(kept, lambda: {"x": 1}, clock=clock, interval_s=1.0)
    assert sampler.tick()
    clock.advance(1.25)
    assert sampler.tick()
    assert sampler.due_in() == 0.75
    clock.advance(0.5)
    assert not sampler.tick()


def test_a_snapshot_that_raises_is_a_gap_and_never_a_zero() -> None:
    clock = ManualClock()
    kept = Kept(clock)
    answers: list[dict[str, float | None] | None] = [{"a": 1.0}, None, {"a": None}]

    def snapshot() -> dict[str, float | None]:
        answer = answers.pop(0)
        if answer is None:
            raise ConnectionError("engine gone")
        return answer

    sampler = OccupancySampler(kept, snapshot, clock=clock, interval_s=1.0)
    for _ in range(3):
        sampler.tick()
        clock.advance(1.0)
    assert [row["values"] for row in kept.rows()] == [{"a": 1.0}, {"a": None}]
    assert sampler.missed == 1
