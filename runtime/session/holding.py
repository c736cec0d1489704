"""What a held step does to serving: nothing is admitted, and a retry renews the engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engines.monitor import HealthMonitor
from runtime.rollout.gate import AdmissionGate

REASON = "held"


@dataclass(slots=True, kw_only=True)
class ServingHold:
    """Implements ``retrying.HoldEffects`` over the gate and the monitor.

    Held means that everything waits for a person, hours perhaps. Groups that went on failing
    meanwhile, or ran into their deadlines, would let the stop rule end the run first; a shut gate
    admits none and stops their clocks.
    """

    gate: AdmissionGate
    monitor: HealthMonitor
    _has_shut: bool = field(default=False, init=False)
    """The gate was open when the step was held; an evaluation opens its own."""

    def begin(self) -> None:
        """Admit nothing."""
        self._has_shut = self._has_shut or self.gate.is_open
        self.gate.shut(REASON)

    def asked(self) -> None:
        """Let dead engines be started again: without them the try would fail unmade."""
        self.monitor.renew()

    def end(self) -> None:
        """Admit again, if it was this hold that shut the gate."""
        if self._has_shut:
            self._has_shut = False
            self.gate.open()
