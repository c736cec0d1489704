"""How full the pipeline is: a sample every few seconds in ``pipeline_occupancy.jsonl``.

A sample speaks for the time since the one before (``covered_s``), no longer than the interval: what
lies between two samples that are further apart is missing coverage, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from runtime.clock import Clock
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.rows import RowWriter

_log = get_logger()

Snapshot = Callable[[], Mapping[str, float | int | str | None]]
"""Current values by flat name; None where one cannot be had. Runs in the event loop: no waits."""


class OccupancySampler:
    """Takes a snapshot at start, start + interval and so on; a late one does not shift the next."""

    def __init__(
        self, rows: RowWriter, snapshot: Snapshot, *, clock: Clock, interval_s: float = 1.0
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s must be positive: {interval_s}")
        self._rows = rows
        self._snapshot = snapshot
        self._clock = clock
        self._interval_s = interval_s
        self._start: float | None = None
        self._taken = 0
        self._last: float | None = None
        self._failing = False
        self.missed = 0
        """Sampling times without a sample: too late, or the snapshot raised."""

    def due_in(self) -> float:
        """Seconds until the next sample; 0 when it is due."""
        if self._start is None:
            return 0.0
        due = self._start + self._taken * self._interval_s
        return max(0.0, due - self._clock.monotonic())

    def tick(self) -> bool:
        """Take a sample if one is due; returns whether a row was written. Never raises."""
        now = self._clock.monotonic()
        if self._start is None:
            self._start = now
        if now < self._start + self._taken * self._interval_s:
            return False
        reached = int((now - self._start) / self._interval_s + 1e-9)
        self.missed += max(0, reached - self._taken)
        self._taken = reached + 1
        values = self._values()
        if values is None:
            self.missed += 1
            return False
        covered = 0.0 if self._last is None else min(now - self._last, self._interval_s)
        self._last = now
        self._rows.append(
            {"interval_s": self._interval_s, "covered_s": round(covered, 6), "values": values}
        )
        return True

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.tick()
            await anyio.sleep(max(self.due_in(), 0.001))

    def _values(self) -> dict[str, float | int | str | None] | None:
        try:
            values = dict(self._snapshot())
        except Exception as error:  # telemetry must not end a run, whatever a snapshot meets
            if not self._failing:
                _log.warning(Event.OCCUPANCY_MISSED, error=f"{type(error).__name__}: {error}")
            self._failing = True
            return None
        self._failing = False
        return values
