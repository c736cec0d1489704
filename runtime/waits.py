"""Waits with a deadline, a warning before it, and a name for what they wait for.

Waits on infrastructure can be stretched on a slow machine by ``MILEPOST_INFRA_TIMEOUT_MULTIPLIER``.
Poll intervals, verifier limits, the run's duration, the engine's watchdog and the trainer's
distributed timeout are not of that kind: they never pass through ``stretched``.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, get_args

import anyio
import structlog

from runtime.errors import ConfigError, WaitTimeout

MULTIPLIER = "MILEPOST_INFRA_TIMEOUT_MULTIPLIER"
WARN_EVERY_S = 30.0

InfraWait = Literal[
    "publication",
    "drain",
    "refresh",
    "router",
    "readiness",
    "judge",
    "coordination",
    "evaluation_submission",
    "cleanup",
]
"""The kinds of wait that may be stretched."""

_log = structlog.get_logger("waits")


def multiplier(environ: Mapping[str, str] = os.environ) -> float:
    """Read the stretch factor; 1 when the variable is unset or empty.

    Raises:
        ConfigError: if it is no number, not finite, or below 1.
    """
    text = environ.get(MULTIPLIER, "")
    if not text:
        return 1.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1.0):
        raise ConfigError(f"{MULTIPLIER}={text!r}: expected a finite number >= 1", value=text)
    return value


def stretched(kind: InfraWait, seconds: float, environ: Mapping[str, str] = os.environ) -> float:
    """Stretch a limit of one of the infrastructure kinds.

    Raises:
        ConfigError: if the variable is malformed.
        ValueError: if ``kind`` is none of ``InfraWait``; other limits are not stretched.
    """
    if kind not in get_args(InfraWait):
        raise ValueError(f"{kind!r} is no infrastructure wait")
    return seconds * multiplier(environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWait:
    """What a warning says."""

    name: str
    waited_s: float
    deadline_s: float


def log_slow_wait(slow: SlowWait) -> None:
    """Write the warning to the log: the default callback."""
    _log.warning(
        "wait.slow",
        waiting_for=slow.name,
        elapsed_s=round(slow.waited_s, 3),
        deadline_s=slow.deadline_s,
    )


class Wait:
    """A wait with a limit: ``async with Wait("2 engines to load e3.u55", 60.0): ...``.

    Warns after min(30 s, the unstretched limit) and every 30 s from then on; at the deadline the
    body is cancelled and WaitTimeout names what was waited for. Cancellation from outside goes
    through untouched, so a limit above it always holds. A deadline of infinity never ends the body,
    it only warns. One use per object.

    Args:
        name: what is waited for, or a callable asked when the text is needed (to count down what is
            missing).
        deadline_s: limit in seconds; at or below 0 the body is cancelled at its first await.
        unstretched_s: the limit before stretching, where that is shorter.
        on_slow: gets each warning; called on the event loop, must not block.
        warn_every_s: 30, another value in tests.
    """

    def __init__(
        self,
        name: str | Callable[[], str],
        deadline_s: float,
        *,
        unstretched_s: float | None = None,
        on_slow: Callable[[SlowWait], None] = log_slow_wait,
        warn_every_s: float = WARN_EVERY_S,
    ) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._first_s = min(
            warn_every_s, deadline_s, deadline_s if unstretched_s is None else unstretched_s
        )
        self._every_s = warn_every_s
        self._on_slow = on_slow
        self._scope = anyio.CancelScope()
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0

    @property
    def name(self) -> str:
        """What is waited for, as of now."""
        return self._name if isinstance(self._name, str) else self._name()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self._scope.deadline = anyio.current_time() + self._deadline_s
        self._scope.__enter__()
        self._timer = loop.call_later(max(self._first_s, 0.0), self._warn)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise WaitTimeout(
                f"waited {self._deadline_s:g} s for {self.name}",
                waiting_for=self.name,
                deadline_s=self._deadline_s,
            )
        return swallowed

    def _warn(self) -> None:
        loop = asyncio.get_running_loop()
        waited = loop.time() - self._started
        self._on_slow(SlowWait(name=self.name, waited_s=waited, deadline_s=self._deadline_s))
        self._timer = loop.call_later(self._every_s, self._warn)
