"""What makes a session end before its run does: people, the scheduler, and nobody at all."""

from __future__ import annotations

import signal
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
    _is_terminated: bool = False

    @classmethod
    def of(
        cls, root: RunRoot, *, epoch: int, detached: bool, detach_grace_s: float, clock: Clock
    ) -> Signals:
        """The signals of one session."""
        watch = None if detached else Watch(clock, limit_s=detach_grace_s, again_s=1.0)
        return cls(Control(root), epoch, watch)

    def on_signal(self, number: signal.Signals) -> None:
        """Remember a SIGTERM or SIGINT of the guard."""
        del number
        self._is_terminated = True

    def retry_requested(self, failure_id: str) -> bool:
        """A person asked for one more try; using it up."""
        return self._control.take_retry(failure_id)

    def end_requested(self) -> End | None:
        """The end somebody asked for, the strongest first; None to go on."""
        request = self._control.stop_request(self._epoch)
        if request is not None:
            return End(by=_BY_MODE[request.mode])
        if self._is_terminated:
            return End(by=EndedBy.SIGTERM)
        if self._attached is not None and self._attached.has_lapsed(self._control.attached()):
            return End(by=EndedBy.PARKED)
        return None
