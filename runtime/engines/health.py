"""What shows that an engine lives: its answer to a probe, or its work for others meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from configs.session import Health
from runtime import faults
from runtime.engines.protocol import EngineClient
from runtime.errors import RunError, TransportError

Sleep = Callable[[float], Awaitable[None]]

EXIT_POLL_S = 1.0
"""How often the server processes are looked at."""
DETECT_SLACK_S = 5.0
"""Beyond ``interval_s * misses``, from a hang to the engine's death at the latest."""
SILENT_S = 4.0
"""For any answer at all, of an engine that a publication could not use."""
_SECOND_LOOK = 0.9
"""Share of a probe's limit after which progress is looked at, to add nothing to the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """``[health]`` of the run file."""

    enabled: bool = True
    """Off: no probes, and no recovery either."""
    interval_s: float = 10.0
    timeout_s: float = 10.0
    misses: int = 3
    first_wait_s: float = 0.0
    """Before the first probe after a start and after every resume; raise it for cold compiles."""
    restarts_per_hour: int = 3
    backoff_s: float = 5.0
    """Before the second restart within the hour; doubles with each further one."""

    @property
    def probe_spacing_s(self) -> float:
        """Between the probes of one round, as far apart as the promised time of detection allows.

        An engine may hang just after a round, so the next one begins ``interval_s`` later, and the
        last of its probes still gets its whole ``timeout_s``. Where the settings leave no room for
        that promise (a timeout above the whole sum) probes follow each other as fast as we look.
        """
        if self.misses == 1:
            return 0.0
        promised = self.interval_s * self.misses + DETECT_SLACK_S
        left = promised - self.interval_s - self.timeout_s - 2 * EXIT_POLL_S
        return min(self.interval_s, max(EXIT_POLL_S, left / (self.misses - 1)))


def health_settings(health: Health) -> HealthSettings:
    """``[health]`` as the monitor takes it."""
    return HealthSettings(
        enabled=health.enabled,
        interval_s=health.interval,
        timeout_s=health.timeout,
        misses=health.misses,
        first_wait_s=health.first_wait,
        restarts_per_hour=health.restarts_per_hour,
    )


async def shows_life(client: EngineClient, timeout_s: float, sleep: Sleep) -> bool:
    """It answers a generation probe, or makes tokens for others while the probe waits."""
    if faults.plan is not None and await faults.plan.pause("engine.probe") is faults.Kind.DROP:
        return False
    is_alive = has_moved = False

    async def count_tokens() -> None:
        nonlocal has_moved
        try:
            before = (await client.load()).generated_tokens
            await sleep(_SECOND_LOOK * timeout_s)
            after = (await client.load()).generated_tokens
        except RunError:
            return
        has_moved = before is not None and after is not None and after > before

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_tokens)
        is_alive = await client.is_alive(timeout_s=timeout_s)
        tasks.cancel_scope.cancel()
    return is_alive or has_moved


async def is_silent(client: EngineClient, sleep: Sleep) -> bool:
    """No answer of any kind for ``SILENT_S``.

    A refusal is an answer, and a paused engine still tells its load.
    """
    has_answered = False

    async def ask(scope: anyio.CancelScope) -> None:
        nonlocal has_answered
        try:
            await client.load()
        except TransportError:
            pass  # no answer: just what is asked here
        except RunError:
            has_answered = True
        else:
            has_answered = True
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, tasks.cancel_scope)
        await sleep(SILENT_S)
        tasks.cancel_scope.cancel()
    return not has_answered
