"""The trainer's wait for a collection: how it stands, when to warn, when to give up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.clock import Clock
from runtime.errors import WaitTimeout

WARN_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeWait:
    """One look at a wait."""

    waited_s: float
    idle_s: float
    """Since anything last happened to any group, with the gate open."""
    groups_in_flight: int
    groups_finished: int
    wanted: int


class TakeWatch:
    """Watches one wait.

    Args:
        clock: monotonic.
        no_progress_s: limit of ``idle_s``.
        on_wait: told every 30 s, or None.
    """

    def __init__(
        self, clock: Clock, no_progress_s: float, on_wait: Callable[[TakeWait], None] | None
    ) -> None:
        self._clock = clock
        self._no_progress_s = no_progress_s
        self._on_wait = on_wait
        self._started = self._warned = clock.monotonic()

    def look(self, *, progress_at: float, in_flight: int, finished: int, wanted: int) -> None:
        """Judge the wait now.

        Raises:
            WaitTimeout: if nothing happened for ``no_progress_s``.
        """
        now = self._clock.monotonic()
        wait = TakeWait(
            waited_s=now - self._started,
            idle_s=now - max(progress_at, self._started),
            groups_in_flight=in_flight,
            groups_finished=finished,
            wanted=wanted,
        )
        if wait.idle_s > self._no_progress_s:
            raise WaitTimeout(
                f"waited {wait.waited_s:.0f} s for a collection of {wanted} groups, the last "
                f"{wait.idle_s:.0f} s without any progress: {finished} finished, {in_flight} in "
                "flight",
                groups_in_flight=in_flight,
                groups_finished=finished,
            )
        if self._on_wait is not None and now - self._warned >= WARN_EVERY_S:
            self._warned = now
            self._on_wait(wait)
