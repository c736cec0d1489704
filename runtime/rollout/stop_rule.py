"""The stop rule, the only one for serving errors.

Of the group attempts that completed in the last five minutes, at least half failed, and that for
five minutes on end: then going on only burns GPUs. Below half, or with an empty window, the time
starts over. Sustained time counts up to the newest completed attempt and no further, so a short
burst followed by silence never becomes fatal.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runtime.clock import Clock

WINDOW_S = 300.0
SUSTAINED_S = 300.0
SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReading:
    """What the rule sees now."""

    window_attempts: int
    """Group attempts completed in the last five minutes."""
    window_failed: int
    high_s: float
    """Length of the present stretch at or above half, up to the newest completed attempt."""
    is_fatal: bool

    @property
    def fraction(self) -> float:
        """Failed share of the window; 0 when it is empty."""
        return self.window_failed / self.window_attempts if self.window_attempts else 0.0


class StopRule:
    """Counts whole group attempts: one each, however many of its samples failed.

    A retry is another attempt. Lifecycle cancellations, pending requests and reward filters are no
    failures and are not told to it. An attempt is in the window for exactly ``WINDOW_S`` seconds
    from its completion (at that age it has left). Each event costs amortised O(1).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window: deque[tuple[float, bool]] = deque()
        self._failed = 0
        self._newest = 0.0
        self._changed_at = 0.0
        self._high_since: float | None = None

    def record(self, *, failed: bool) -> None:
        """A group attempt completed now."""
        now = self._clock.monotonic()
        self._expire(now)
        self._window.append((now, failed))
        self._failed += failed
        self._newest = now
        self._changed_at = now

    def read(self) -> StopReading:
        """Judge the present moment; cheap, meant to be asked on every tick of a wait."""
        self._expire(self._clock.monotonic())
        high = 0.0
        if self._is_high:
            since = self._changed_at if self._high_since is None else self._high_since
            high = max(0.0, self._newest - since)
        return StopReading(
            window_attempts=len(self._window),
            window_failed=self._failed,
            high_s=high,
            is_fatal=high >= SUSTAINED_S,
        )

    @property
    def _is_high(self) -> bool:
        return bool(self._window) and self._failed >= SHARE * len(self._window)

    def _expire(self, now: float) -> None:
        # The share also changes when an attempt leaves the window, at a moment nobody called us:
        # the departures are replayed in order. A moment is judged once it lies in the past, when
        # all that happened at it is known.
        self._judge_before(now)
        while self._window and self._window[0][0] + WINDOW_S <= now:
            left_at = self._window[0][0] + WINDOW_S
            while self._window and self._window[0][0] + WINDOW_S <= left_at:
                self._failed -= self._window.popleft()[1]
            self._changed_at = left_at
            self._judge_before(now)

    def _judge_before(self, now: float) -> None:
        if self._changed_at >= now:
            return
        if not self._is_high:
            self._high_since = None
        elif self._high_since is None:
            self._high_since = self._changed_at
