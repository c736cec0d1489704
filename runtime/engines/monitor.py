"""The health monitor of a group of engines: finds out who is dead, and starts them again.

Probes run at the same time for all engines, every 10 s, each within 10 s; the third miss in a row
is death. A probe is a real generation, and tokens made meanwhile count as life too, since a long
prefill can hold a probe up. A server process that has exited is dead at once. While engines are
paused, publishing or offloaded they cannot answer: whoever does that to them pauses the monitor.

A dead engine's slot is started again in the background, at most 3 times an hour, with back-off; the
new incarnation is stale until a publication brings it up to date.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup, TaskStatus

from configs.session import Health
from runtime.clock import Clock
from runtime.engines.pool import EnginePool, LiveEngine, SlotRunner, SlotState
from runtime.engines.protocol import EngineAddress, EngineClient
from runtime.errors import RunError
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

Sleep = Callable[[float], Awaitable[None]]

EXIT_POLL_S = 1.0
"""How often the server processes are looked at."""
HOUR_S = 3600.0
_log = get_logger()


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


class _Watch:
    """What the monitor remembers of one incarnation."""

    __slots__ = ("incarnation", "misses", "probe_at")

    def __init__(self, incarnation: str, probe_at: float) -> None:
        self.incarnation = incarnation
        self.probe_at = probe_at
        self.misses = 0


class HealthMonitor:
    """Watches and restarts the engines of one pool.

    Args:
        pool: states; the monitor reports to it, everybody else reads it.
        runners: the process owner of each slot.
        connect: makes the client of a server from its address.
        settings: ``[health]``.
        clock: monotonic.
        sleep: waits on that clock.
    """

    def __init__(
        self,
        pool: EnginePool,
        runners: Mapping[int, SlotRunner],
        settings: HealthSettings,
        *,
        connect: Callable[[EngineAddress], EngineClient],
        clock: Clock,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        self._pool = pool
        self._runners = runners
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._watches: dict[int, _Watch] = {}
        self._restarts: dict[int, deque[float]] = {slot: deque() for slot in runners}
        self._busy: set[int] = set()
        self._checking: set[int] = set()
        self._pauses = 0
        self._turn = 0
        self._tasks: TaskGroup | None = None

    # --- Life -------------------------------------------------------------------------------

    async def start_engines(self) -> None:
        """Start every slot's first incarnation, all at the same time.

        Raises:
            WaitTimeout: if a server does not answer in time.
            EngineDead: if one ended while starting.
        """
        errors: list[Exception] = []

        async def start(slot: int) -> None:
            try:
                await self._join(slot)
            except Exception as error:
                self._pool.start_failed(slot, str(error))
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for slot in self._runners:
                tasks.start_soon(start, slot)
        if errors:
            raise errors[0]

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; in a task group the caller owns. Returns at once when disabled."""
        if not self._settings.enabled:
            task_status.started()
            return
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            task_status.started()
            try:
                while True:
                    await self._sleep(EXIT_POLL_S)
                    await self.look()
            finally:
                self._tasks = None

    async def stop(self) -> None:
        """End every server. After ``run`` has been cancelled; idempotent."""
        async with anyio.create_task_group() as tasks:
            for slot, runner in self._runners.items():
                self._pool.retire(slot, "the session ends")
                tasks.start_soon(runner.stop)
        await self._pool.close()

    def pause(self) -> None:
        """Engines cannot answer for a while (publication, offload). Nests; ``resume`` each time."""
        self._pauses += 1
        self._turn += 1

    def resume(self) -> None:
        """They can again; every engine gets ``first_wait`` before its next probe."""
        self._pauses -= 1
        if self._pauses == 0:
            first = self._clock.monotonic() + self._settings.first_wait_s
            for watch in self._watches.values():
                watch.misses = 0
                watch.probe_at = first

    @property
    def is_paused(self) -> bool:
        """Somebody has paused it."""
        return self._pauses > 0

    # --- What it answers for ------------------------------------------------------------------

    async def kill(self, slot: int, incarnation: str, reason: str) -> bool:
        """End an engine for good: its requests are given up, its process is gone on return.

        For publications too, which kill whatever they could not verify. Recovery, where enabled,
        starts the slot again in the background. False when that incarnation is gone already.
        """
        if not self._pool.mark_dead(slot, incarnation, reason):
            return False
        await self._bury(slot)
        return True

    def is_exhausted(self, slot: int) -> bool:
        """The slot has used up its restarts of this hour, or recovery is off."""
        return not self._settings.enabled or self._num_restarts(slot) >= (
            self._settings.restarts_per_hour
        )

    @property
    def lost_slots(self) -> list[int]:
        """Dead slots that nothing will start again before the hour has passed: a step is held.

        One that waits for its last restart of the hour is none of them.
        """
        return [
            view.slot
            for view in self._pool.views()
            if view.state is SlotState.DEAD
            and view.slot not in self._busy
            and self.is_exhausted(view.slot)
        ]

    # --- One look -----------------------------------------------------------------------------

    async def look(self) -> None:
        """Begin a check of every engine that is not being checked, and restart who is dead."""
        assert self._tasks is not None
        if not self.is_paused:
            for engine in self._pool.live():
                if engine.slot not in self._busy | self._checking:
                    self._checking.add(engine.slot)
                    self._tasks.start_soon(self._check, engine)
        for view in self._pool.views():
            if view.state is SlotState.DEAD:
                self._restart_soon(view.slot)
        await self._pool.close_left()

    async def _check(self, engine: LiveEngine) -> None:
        try:
            if not await self._runners[engine.slot].is_running():
                await self.kill(engine.slot, engine.incarnation, "its server process has exited")
                return
            watch = self._watch(engine)
            while self._clock.monotonic() >= watch.probe_at:
                watch.probe_at = self._clock.monotonic() + self._settings.interval_s
                turn = self._turn
                shows_life = await self._shows_life(engine.client)
                if turn != self._turn or self.is_paused:
                    return  # it was paused meanwhile: the answer says nothing
                await self._judge(engine, watch, shows_life=shows_life)
        finally:
            self._checking.discard(engine.slot)

    async def _judge(self, engine: LiveEngine, watch: _Watch, *, shows_life: bool) -> None:
        if shows_life:
            watch.misses = 0
            self._pool.mark_recovered(engine.slot, engine.incarnation)
            return
        watch.misses += 1
        reason = f"{watch.misses} of {self._settings.misses} probes missed in a row"
        if watch.misses >= self._settings.misses:
            watch.probe_at = math.inf
            await self.kill(engine.slot, engine.incarnation, reason)
        else:
            self._pool.mark_suspect(engine.slot, engine.incarnation, reason)

    async def _shows_life(self, client: EngineClient) -> bool:
        """It answers a generation probe, or makes tokens for others while the probe waits."""
        is_alive = has_moved = False

        async def count_tokens() -> None:
            nonlocal has_moved
            try:
                before = (await client.load()).generated_tokens
                # The second look comes just before the probe's own limit, to add nothing to it.
                await self._sleep(0.9 * self._settings.timeout_s)
                after = (await client.load()).generated_tokens
            except RunError:
                return
            has_moved = before is not None and after is not None and after > before

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count_tokens)
            is_alive = await client.is_alive(timeout_s=self._settings.timeout_s)
            tasks.cancel_scope.cancel()
        return is_alive or has_moved

    def _watch(self, engine: LiveEngine) -> _Watch:
        watch = self._watches.get(engine.slot)
        if watch is None or watch.incarnation != engine.incarnation:
            first = self._clock.monotonic() + self._settings.first_wait_s
            watch = self._watches[engine.slot] = _Watch(engine.incarnation, first)
        return watch

    # --- Restarting ---------------------------------------------------------------------------

    async def _bury(self, slot: int) -> None:
        """End whatever is left of the server; a new one may need its memory and its port."""
        self._busy.add(slot)
        try:
            with anyio.CancelScope(shield=True):  # bounded by the runner itself
                await self._runners[slot].stop()
        finally:
            self._busy.discard(slot)

    def _restart_soon(self, slot: int) -> None:
        if self._tasks is None or slot in self._busy or self.is_exhausted(slot):
            return
        self._busy.add(slot)
        self._tasks.start_soon(self._restart, slot)

    async def _restart(self, slot: int) -> None:
        try:
            used = self._num_restarts(slot)
            self._restarts[slot].append(self._clock.monotonic())
            if used:
                await self._sleep(self._settings.backoff_s * 2 ** (used - 1))
            if self._pool.state(slot) is not SlotState.DEAD:
                return  # retired meanwhile
            self._pool.restarting(slot)
            try:
                await self._join(slot)
            except Exception as error:
                _log.warning(Event.ENGINE_DIED, slot=slot, reason=f"restart failed: {error}")
                self._pool.start_failed(slot, f"restart failed: {error}")
        finally:
            self._busy.discard(slot)

    async def _join(self, slot: int) -> None:
        address = await self._runners[slot].start()
        client = self._connect(address)
        try:
            info = await client.info()
        except BaseException:
            await client.close()
            raise
        self._pool.joined(address, info, client)

    def _num_restarts(self, slot: int) -> int:
        times = self._restarts[slot]
        while times and times[0] + HOUR_S <= self._clock.monotonic():
            times.popleft()
        return len(times)
