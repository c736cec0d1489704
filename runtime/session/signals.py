"""What makes a session end before its run does: people, the scheduler, and nobody at all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from runtime.clock import Clock
from runtime.rundir.control import Control, StopMode
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Watch
from runtime.session.ends import End, EndedBy

_BY_MODE: dict[StopMode, EndedBy] = {
    "stop": EndedBy.STOP,
    "final": EndedBy.STOP_FINAL,
    # The guard kills for "now"; a session that sees it first stops as well as it can.
    "now": EndedBy.STOP,
}


@dataclass(slots=True)
class Signals:
    """Reads control files, remembers SIGTERM, and judges whether anybody is attached.

    Implements ``runtime.session.retrying.HoldSignals``.
    """

    _control: Control
    _epoch: int
    _attached: Watch | None
    """None: a detached run needs nobody."""
    _clock: Clock
    _over_time: Callable[[], bool]
    _terminated_at: float | None = None
    """Monotonic, of the first SIGTERM."""

    @classmethod
    def of(
        cls,
        root: RunRoot,
        *,
        epoch: int,
        detached: bool,
        detach_grace_s: float,
        clock: Clock,
        over_time: Callable[[], bool] = lambda: False,
    ) -> Signals:
        """The signals of one session.

        Args:
            root: the run.
            epoch: the session's.
            detached: it goes on when nobody is attached.
            detach_grace_s: how long it waits for somebody otherwise.
            clock: of this process.
            over_time: the run's wall-clock bound has passed.
        """
        watch = None if detached else Watch(clock, limit_s=detach_grace_s, again_s=1.0)
        return cls(Control(root), epoch, watch, clock, over_time)

    def on_signal(self, number: signal.Signals) -> None:
        """Remember a SIGTERM or SIGINT of the guard."""
        del number
        if self._terminated_at is None:
            self._terminated_at = self._clock.monotonic()

    @property
    def is_terminated(self) -> bool:
        """SIGTERM or SIGINT came."""
        return self._terminated_at is not None

    def grace_left_s(self, grace_s: float) -> float:
        """Seconds of a grace that are left since SIGTERM came; all of it before."""
        if self._terminated_at is None:
            return grace_s
        return grace_s - (self._clock.monotonic() - self._terminated_at)

    def retry_requested(self, failure_id: str) -> bool:
        """A person asked for one more try; using it up."""
        return self._control.take_retry(failure_id)

    def end_requested(self) -> End | None:
        """The end somebody asked for, the strongest first; None to go on."""
        request = self._control.stop_request(self._epoch)
        if request is not None:
            return End(by=_BY_MODE[request.mode])
        if self._terminated_at is not None:
            return End(by=EndedBy.SIGTERM)
        if self._over_time():
            return End(by=EndedBy.WALL_CLOCK)
        if self._attached is not None and self._attached.has_lapsed(self._control.attached()):
            return End(by=EndedBy.PARKED)
        return None
