"""The health monitor of a group of engines: finds out who is dead, and starts them again.

All engines are probed at the same time, each in rounds that begin every 10 s. A probe is a real
generation and has 10 s; while it stays unanswered the next one of its round goes out beside it, so
that the third miss, which is death, comes within ``interval x misses + 5 s`` of the hang however
long a probe may take. Any answer ends the round, and so do tokens made for others, since a long
prefill can hold a probe up. A server process that has exited is dead at once. While engines are
paused, publishing or offloaded they cannot answer: whoever does that to them pauses the monitor,
for one engine where the others serve on.

A dead engine's slot is started again in the background, at most 3 times an hour, with back-off; the
new incarnation is stale until a publication brings it up to date.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

import anyio
from anyio.abc import TaskGroup, TaskStatus

from runtime import faults
from runtime.clock import Clock
from runtime.engines.health import (
    EXIT_POLL_S,
    SILENT_S,
    HealthSettings,
    Sleep,
    is_silent,
    shows_life,
)
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, EngineClient
from runtime.engines.slots import LiveEngine, SlotRunner, SlotState
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

HOUR_S = 3600.0
_log = get_logger()


class _Watch:
    """What the monitor remembers of one incarnation."""

    __slots__ = ("incarnation", "round_at")

    def __init__(self, incarnation: str, round_at: float) -> None:
        self.incarnation = incarnation
        self.round_at = round_at


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
        self._looking: set[int] = set()
        self._rounds: dict[int, anyio.CancelScope] = {}
        self._burials: dict[int, anyio.Event] = {}
        self._pauses: Counter[int] = Counter()
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

    def pause(self, slot: int | None = None) -> None:
        """Engines cannot answer for a while (publication, offload). Nests; ``resume`` each time.

        What was asked and is not answered yet says nothing any more.

        Args:
            slot: whose engine; None: every one's.
        """
        for each in self._slots(slot):
            self._pauses[each] += 1
            if each in self._rounds:
                self._rounds[each].cancel()

    def resume(self, slot: int | None = None) -> None:
        """They can again; each gets ``first_wait`` before its next probe.

        Args:
            slot: as it was given to ``pause``.
        """
        first = self._clock.monotonic() + self._settings.first_wait_s
        for each in self._slots(slot):
            self._pauses[each] -= 1
            if not self._pauses[each] and each in self._watches:
                self._watches[each].round_at = first

    def is_paused(self, slot: int) -> bool:
        """Somebody has paused it for this slot."""
        return self._pauses[slot] > 0

    def _slots(self, slot: int | None) -> list[int]:
        return list(self._runners) if slot is None else [slot]

    # --- What it answers for ------------------------------------------------------------------

    async def kill(self, slot: int, incarnation: str, reason: str) -> bool:
        """End an engine for good: its requests are given up, its process is gone on return.

        For publications too, which kill whatever they could not verify. Recovery, where enabled,
        starts the slot again in the background. False when that incarnation is gone already, or
        somebody else has just ended it.
        """
        if not self._pool.mark_dead(slot, incarnation, reason):
            if slot in self._burials:
                await self._burials[slot].wait()
            return False
        if slot in self._rounds:
            self._rounds[slot].cancel()
        await self._bury(slot)
        return True

    async def bury_lost(self) -> list[int]:
        """End every engine that is gone or answers nothing, without waiting for a look or a round.

        After a publication failed: it paused the monitor, and its retry must not meet an engine
        that cannot take part any more. With its own wait of 30 s for an answer, a hung engine is
        dead here in the same time as by probes. Returns which slots.
        """
        gone: list[int] = []

        async def look(engine: LiveEngine) -> None:
            reason = await self._why_lost(engine)
            if reason is not None and await self.kill(engine.slot, engine.incarnation, reason):
                gone.append(engine.slot)

        async with anyio.create_task_group() as tasks:
            for engine in self._pool.live():
                tasks.start_soon(look, engine)
        return sorted(gone)

    async def _why_lost(self, engine: LiveEngine) -> str | None:
        if not await self._runners[engine.slot].is_running():
            return "its server process has exited"
        if self._settings.enabled and await is_silent(engine.client, self._sleep):
            return f"it answered nothing for {SILENT_S:g} s after a publication had failed"
        return None

    def is_exhausted(self, slot: int) -> bool:
        """The slot has used up its restarts of this hour, or recovery is off."""
        return not self._settings.enabled or self._num_restarts(slot) >= (
            self._settings.restarts_per_hour
        )

    def renew(self) -> None:
        """Every slot has all its restarts again: a person looked, and asked for one more try."""
        for times in self._restarts.values():
            times.clear()

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
        for engine in self._pool.live():
            if engine.slot not in self._busy and not self.is_paused(engine.slot):
                self._look_at(engine, self._tasks)
        for view in self._pool.views():
            if view.state is SlotState.DEAD:
                self._restart_soon(view.slot)
        await self._pool.close_left()

    def _look_at(self, engine: LiveEngine, tasks: TaskGroup) -> None:
        if engine.slot not in self._looking:
            self._looking.add(engine.slot)
            tasks.start_soon(self._check_exit, engine)
        watch, now = self._watch(engine), self._clock.monotonic()
        if now >= watch.round_at and engine.slot not in self._rounds:
            watch.round_at = now + self._settings.interval_s
            self._rounds[engine.slot] = anyio.CancelScope()
            tasks.start_soon(self._probe_round, engine, self._rounds[engine.slot])

    async def _check_exit(self, engine: LiveEngine) -> None:
        try:
            if not await self._runners[engine.slot].is_running():
                await self.kill(engine.slot, engine.incarnation, "its server process has exited")
        finally:
            self._looking.discard(engine.slot)

    async def _probe_round(self, engine: LiveEngine, scope: anyio.CancelScope) -> None:
        """Probes beside each other until one shows life or all are missed; void when cancelled."""
        misses = 0
        is_alive = False

        async def probe(number: int) -> None:
            nonlocal misses, is_alive
            await self._sleep(number * self._settings.probe_spacing_s)
            if await shows_life(engine.client, self._settings.timeout_s, self._sleep):
                is_alive = True
                scope.cancel()
                return
            misses += 1
            if misses < self._settings.misses:
                self._pool.mark_suspect(engine.slot, engine.incarnation, self._said(misses))

        try:
            with scope:
                async with anyio.create_task_group() as probes:
                    for number in range(self._settings.misses):
                        probes.start_soon(probe, number)
        finally:
            del self._rounds[engine.slot]
        if is_alive:
            self._pool.mark_recovered(engine.slot, engine.incarnation)
        elif misses == self._settings.misses and not scope.cancel_called:
            await self.kill(engine.slot, engine.incarnation, self._said(misses))

    def _said(self, misses: int) -> str:
        return f"{misses} of {self._settings.misses} probes missed in a row"

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
        buried = self._burials[slot] = anyio.Event()
        try:
            if faults.plan is not None:
                await faults.plan.pause("engine.bury")
            with anyio.CancelScope(shield=True):  # bounded by the runner itself
                await self._runners[slot].stop()
        finally:
            self._busy.discard(slot)
            del self._burials[slot]
            buried.set()

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
            if faults.plan is not None:
                await faults.plan.pause("engine.restart")
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
        if faults.plan is not None:
            await faults.plan.pause("engine.start")
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
