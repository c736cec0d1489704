"""Publication as the session sees it: weights out, pool told, restarted engines mended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from runtime.engines.monitor import HealthMonitor
from runtime.engines.pool import EnginePool
from runtime.engines.slots import LiveEngine, SlotState
from runtime.errors import EngineDead, RetryBy, RunError
from runtime.policy import PolicyId
from runtime.publication.decision import Decision
from runtime.publication.limits import PublicationLimits
from runtime.publication.pausing import PublicationMode
from runtime.publication.protocol import Target
from runtime.publication.transaction import Publisher
from runtime.rollout.gate import JOIN_DEADLINE_S, AdmissionGate
from runtime.telemetry.events import Event
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.telemetry.log import get_logger

_log = get_logger()
_MEND_POLL_S = 0.5
_REST_POLL_S = 0.02
_DRAIN_SLACK_S = 5.0
_TRANSFER_BASE_S = 60.0
_SLOWEST_BYTES_PER_S = 20e6
"""A shared file system on a bad day; every other way is faster."""


def publication_limits(
    drain_deadline_s: float, weight_bytes: int | None = None
) -> PublicationLimits:
    """Limits of a publication by this run's drain and weights.

    The gate cuts what is left after ``drain_deadline_s`` and joins it; the publication's own limit
    of that stage only catches a gate that does not keep its word, so it lies beyond both.

    The transfer's limit goes with the weights: while an engine hangs in it, nobody is served and no
    probe runs, so a small model must not wait as long as a large one.

    Args:
        drain_deadline_s: of the run.
        weight_bytes: of one copy of the weights; None: not known, the longest limit.
    """
    longest = PublicationLimits()
    transfer_s = longest.transfer_s
    if weight_bytes is not None:
        transfer_s = min(transfer_s, _TRANSFER_BASE_S + weight_bytes / _SLOWEST_BYTES_PER_S)
    return PublicationLimits(
        drain_s=drain_deadline_s + JOIN_DEADLINE_S + _DRAIN_SLACK_S, transfer_s=transfer_s
    )


@dataclass(slots=True, kw_only=True)
class Publishing:
    """One policy at a time, to every engine that lives."""

    publisher: Publisher
    pool: EnginePool
    monitor: HealthMonitor
    gate: AdmissionGate
    mode: PublicationMode
    drain_deadline_s: float
    lifecycle: LifecycleLog
    sleeps: bool = False
    """Engines give their memory back while the trainer makes an update."""
    _weights: anyio.Lock = field(default_factory=anyio.Lock, init=False)
    _trainer_at: PolicyId | None = field(default=None, init=False)
    """The published policy while the trainer holds exactly it, otherwise None."""
    _asleep: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]], init=False)
    """Incarnations without memory; the monitor is paused while there are any."""
    _turn: int | None = field(default=None, init=False)
    """Slot whose turn it is in ``rolling`` mode; the monitor is paused for it alone."""

    @asynccontextmanager
    async def changing_weights(self) -> AsyncGenerator[None, None]:
        """Held while the trainer makes an update: its weights are no published policy then.

        Where engines sleep, they have given their memory back when this is entered, and get it
        again in the next publication, the only thing that can make them serve.
        """
        async with self._weights:
            self._trainer_at = None
            if self.sleeps:
                await self._lull()
            yield

    async def publish(self, policy: PolicyId) -> Decision:
        """Make ``policy`` the published one; safe to repeat after a failure.

        Raises:
            PublicationFailed: if no engine was verified.
            EngineDead: if an engine is dead and its restarts are used up.
        """
        self.lifecycle.record(Event.PUBLICATION_STARTED, update=policy.update, policy=str(policy))
        async with self._weights, self.gate.publication():
            await self._wake()
            engines = await self._some_engines()
            if self.mode != "rolling":
                self.monitor.pause()
            try:
                decision = await self.publisher.publish(
                    policy,
                    [_target(engine) for engine in engines],
                    mode=self.mode,
                    drain=self._drain if self.mode == "drain" else None,
                    rest=self._rest if self.mode == "rolling" else None,
                    decided=self._serve,
                )
            except Exception:
                self.lifecycle.record(Event.PUBLICATION_FAILED, update=policy.update)
                # The monitor was paused, in rolling mode for one: the retry would meet an engine
                # that has died or hangs since, and its tries are over before the next look or
                # round.
                await self.monitor.bury_lost()
                raise
            except BaseException:
                self.lifecycle.record(Event.PUBLICATION_FAILED, update=policy.update)
                raise
            finally:
                if self.mode == "rolling":
                    self._take_turn(None)
                    self.pool.end_rests()
                    self.gate.open()
                else:
                    self.monitor.resume()
            self._trainer_at = policy
            self.pool.serve(policy)
            if self.mode == "drain":
                self.gate.open()
        self.lifecycle.record(
            Event.PUBLICATION_COMMITTED,
            update=policy.update,
            policy=str(policy),
            pause_s=decision.pause_s,
            num_bytes=decision.num_bytes,
            stages_s=dict(decision.stages_s),
        )
        return decision

    async def _lull(self) -> None:
        """Have every engine end what it generates and give its memory back."""
        for engine in self.pool.live():
            if (engine.slot, engine.incarnation) in self._asleep:
                continue  # an update that is tried again
            if not self._asleep:
                self.monitor.pause()
            self._asleep.add((engine.slot, engine.incarnation))
            try:
                await engine.client.pause("abort")
                await engine.client.release_memory()
            except RunError as error:
                # It holds memory that the trainer needs now.
                reason = f"did not give its memory back: {error.message}"
                await self.monitor.kill(engine.slot, engine.incarnation, reason)

    async def _wake(self) -> None:
        """Give sleeping engines their memory; whoever cannot take it fails in the publication."""
        asleep, self._asleep = self._asleep, set()
        if not asleep:
            return
        self.monitor.resume()
        for engine in self.pool.live():
            if (engine.slot, engine.incarnation) in asleep:
                try:
                    await engine.client.resume_memory()
                except RunError as error:
                    reason = f"did not get its memory again: {error.message}"
                    await self.monitor.kill(engine.slot, engine.incarnation, reason)

    async def mend_for_ever(self) -> None:
        """Bring restarted engines to the published policy, until cancelled.

        An engine that cannot be brought up is ended by the publisher; the monitor's restart budget
        bounds how often.
        """
        while True:
            await anyio.sleep(_MEND_POLL_S)
            for engine in self.pool.live():
                published = self.pool.published
                if engine.state is SlotState.STALE and published is not None:
                    await self._mend(engine, published)

    async def _mend(self, engine: LiveEngine, published: PolicyId) -> None:
        async with self._weights:
            if self.publisher.is_halted:
                return  # the publication's own retry takes this engine along
            try:
                decision = await self._catch_up(_target(engine), published)
            except RunError as error:
                # One engine that does not come up ends no session; a lost trainer does.
                if error.retry is not RetryBy.SESSION:
                    raise
                _log.warning(Event.PUBLICATION_FAILED, slot=engine.slot, error=error.message)
                return
            if decision is not None:
                self._mark(decision)

    async def _catch_up(self, target: Target, published: PolicyId) -> Decision | None:
        """From the kept snapshot, or from a trainer that still holds the published policy.

        None: the trainer is past it, so the next publication brings this engine along.
        """
        if self.publisher.brings_up_one:
            return await self.publisher.bring_up(target, published)
        if self._trainer_at != published:
            return None
        return await self.publisher.mend(target, published)

    @property
    def has_lost_engines(self) -> bool:
        """``check_engines`` would raise."""
        return bool(self.monitor.lost_slots)

    async def check_engines(self) -> None:
        """See that every engine lives or is to be started again.

        A run that goes on without an engine for good would only be slower, and say so nowhere: it
        is held, whatever the others do.

        Raises:
            EngineDead: if an engine is dead and its restarts are used up.
        """
        if lost := self.monitor.lost_slots:
            raise EngineDead(
                f"engine slots {lost} are dead and the restart budget of this hour is used up "
                "(health.restarts_per_hour)",
                slots=lost,
            )

    async def _some_engines(self) -> list[LiveEngine]:
        """The living engines; waits while every one is being restarted within its budget."""
        while True:
            await self.check_engines()
            if engines := self.pool.live():
                return engines
            await anyio.sleep(_MEND_POLL_S)

    async def _drain(self) -> None:
        await self.gate.close(drain_deadline_s=self.drain_deadline_s, reason="publication")

    async def _rest(self, target: Target) -> None:
        """Send one engine no new work and wait for what it has; stragglers are aborted after it.

        The last engine that serves is not taken away from under its callers: admission waits then.
        """
        self._take_turn(target.slot)
        if not self.pool.rest(target.slot, target.incarnation):
            await self._drain()
            return
        with anyio.move_on_after(self.drain_deadline_s):
            while self.pool.views()[target.slot].active_samples > 0:  # noqa: ASYNC110  # no event says so
                await anyio.sleep(_REST_POLL_S)

    def _take_turn(self, slot: int | None) -> None:
        """Let the monitor watch every engine but this one; None: every one."""
        if self._turn is not None:
            self.monitor.resume(self._turn)
        self._turn = slot
        if slot is not None:
            self.monitor.pause(slot)

    def _serve(self, policy: PolicyId, verified: Sequence[Target]) -> None:
        # Engine by engine, those whose turn is still to come go on with what they hold.
        also = self.pool.published if self.mode == "rolling" else None
        self.pool.serve(policy, also=also if also != policy else None)
        self.pool.end_rests()
        for target in verified:
            self.pool.mark_verified(target.slot, target.incarnation, policy)

    def _mark(self, decision: Decision) -> None:
        policy = PolicyId.parse(decision.policy)
        for verified in decision.verified:
            self.pool.mark_verified(verified.slot, verified.incarnation, policy)


def _target(engine: LiveEngine) -> Target:
    return Target(slot=engine.slot, incarnation=engine.incarnation, client=engine.client)
