"""Time as a value passed in, so that every rule with a clock can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol

from runtime import faults


class Clock(Protocol):
    """Monotonic seconds for deadlines, wall seconds for records."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""
        ...

    def time(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time() if faults.plan is None else faults.plan.now("clock.time")


class ManualClock:
    """A clock that moves only when told; keeps the property that monotonic never goes back."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        """The set time."""
        return self._now

    def time(self) -> float:
        """The set time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds}")
        self._now += seconds
