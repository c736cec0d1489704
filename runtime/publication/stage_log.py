"""The log of stages: which stage of which publication began, ended or failed, and when.

The first question about a publication that hangs is the last stage its log reached.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import structlog

from runtime.clock import Clock
from runtime.policy import PolicyId
from runtime.publication.decision import Stage

_log: structlog.stdlib.BoundLogger = structlog.get_logger("publication")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEvent:
    """One edge of one stage."""

    policy: PolicyId
    stage: Stage
    edge: Literal["started", "finished", "failed"]
    elapsed_s: float
    """0 at the start."""
    error: str | None = None


def log_stage(event: StageEvent) -> None:
    """Write the edge to the log; DEBUG, since INFO is the decision."""
    _log.debug(
        f"publication.stage_{event.edge}",
        policy=str(event.policy),
        stage=event.stage,
        elapsed_s=round(event.elapsed_s, 6),
        error=event.error,
    )


class StageLog:
    """Times the stages of one publication and reports their edges."""

    def __init__(
        self, policy: PolicyId, clock: Clock, report: Callable[[StageEvent], None]
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._report = report
        self.elapsed_s: dict[str, float] = {}

    @asynccontextmanager
    async def stage(self, stage: Stage) -> AsyncGenerator[None]:
        """Surround one stage. Errors and cancellation go through."""
        started = self._clock.monotonic()
        self._edge(stage, "started", 0.0)
        try:
            yield
        except BaseException as exc:
            took_s = self._took(stage, started)
            self._edge(stage, "failed", took_s, f"{type(exc).__name__}: {exc}")
            raise
        self._edge(stage, "finished", self._took(stage, started))

    def _took(self, stage: Stage, started: float) -> float:
        """A stage that comes again, engine by engine, adds up."""
        took_s = self._clock.monotonic() - started
        self.elapsed_s[stage] = self.elapsed_s.get(stage, 0.0) + took_s
        return took_s

    def _edge(
        self,
        stage: Stage,
        edge: Literal["started", "finished", "failed"],
        elapsed_s: float,
        error: str | None = None,
    ) -> None:
        self._report(
            StageEvent(
                policy=self._policy, stage=stage, edge=edge, elapsed_s=elapsed_s, error=error
            )
        )
