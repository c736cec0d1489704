"""The stages of one publication, each over all engines that are still sound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from runtime import faults
from runtime.clock import Clock
from runtime.engines.protocol import EngineInfo, WeightHash
from runtime.errors import EngineError, PublicationFailed, RunError, WaitTimeout
from runtime.policy import PolicyId
from runtime.publication.decision import Decision
from runtime.publication.limits import PublicationLimits
from runtime.publication.pausing import PublicationMode, RefreshPause, plan_pause
from runtime.publication.protocol import PublicationTransport, Snapshot, Target
from runtime.publication.roll import Participant, Roll
from runtime.publication.stage_log import StageLog
from runtime.publication.verification import check_held, check_snapshot
from runtime.waits import Wait

Kill = Callable[[int, str, str], Awaitable[None]]
"""``kill(slot, incarnation, reason)``: returns once that incarnation is gone. Idempotent."""
Turn = Callable[[Target, "Swap"], Awaitable[None]]
"""``turn(target, swap)``: the stages of one engine, from its last request to its first new one."""
Drain = Callable[[], Awaitable[None]]
"""Closes admission, returns once no generation runs. What it closed its caller opens again."""

Decided = Callable[[PolicyId, Sequence[Target]], None]
"""``decided(policy, verified)``: the policy is published; verified engines are about to resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapParts:
    """What every swap of a publisher works with."""

    transport: PublicationTransport
    kill: Kill
    limits: PublicationLimits
    clock: Clock
    infos: dict[tuple[int, str], EngineInfo]
    """Facts of engines by (slot, incarnation), asked for once."""
    pause: RefreshPause = "in_place"
    """How ``refresh`` pauses engines that can be."""


class Swap:
    """One policy on its way to a set of engines; each stage is called once, in order."""

    def __init__(
        self,
        parts: SwapParts,
        log: StageLog,
        policy: PolicyId,
        targets: Sequence[Target],
        mode: PublicationMode,
    ) -> None:
        self.policy = policy
        self.snapshot: Snapshot | None = None
        self._parts = parts
        self._limits = parts.limits
        self._log = log
        self._mode: PublicationMode = mode
        self._roll = Roll(targets)
        self._started_at = parts.clock.time()
        self._paused_at: float | None = None
        self._pause_s: float | None = None
        self._unflushed: list[Participant] = []

    @property
    def verified(self) -> list[Target]:
        """Engines that nothing went wrong with so far: after ``verify`` they hold the policy."""
        return [p.target for p in self._roll.sound]

    async def prepare(self) -> None:
        """Ask engines for their facts, then make the snapshot; engines still serve.

        Raises:
            PublicationFailed: if no engine answers.
            RunError: the trainer's or the file system's own.
        """
        async with self._log.stage("prepare"):
            if faults.plan is not None:
                await faults.plan.pause("publication.prepare")
            await self._roll.each("prepare", self._limits.prepare_s, self._learn)
            self.need_one()
            async with Wait(f"the snapshot of {self.policy}", self._limits.prepare_s):
                kinds = frozenset[WeightHash](
                    p.info.hash for p in self._roll.sound if p.info is not None
                )
                self.snapshot = await self._parts.transport.prepare(self.policy, kinds)
            check_snapshot(self.snapshot)

    async def one_by_one(self, turn: Turn) -> None:
        """Give every sound engine its turn; one that fails in it is gone when it ends.

        Engines that had no turn yet serve on at the policy before. So when the very first one
        fails, they are left alone: what failed may be the snapshot.

        Raises:
            PublicationFailed: if the first engine was not verified, or a failed one is not gone.
            RunError: from the trainer's side.
        """
        snapshot = self._the_snapshot()
        has_verified = False
        for participant in self._roll.sound:
            swap = Swap(self._parts, self._log, self.policy, [participant.target], self._mode)
            (alone,) = swap._roll.all
            swap.snapshot = snapshot
            alone.info, alone.plan = participant.info, participant.plan
            try:
                await turn(participant.target, swap)
                has_verified = True
            except Exception as exc:
                await swap.kill_failed()
                if not (has_verified and isinstance(exc, PublicationFailed)):
                    raise
            finally:
                participant.transfer_s, participant.failure = alone.transfer_s, alone.failure
                self._pause_s = max(self._pause_s or 0.0, swap._pause_s or 0.0)

    async def reuse(self, snapshot: Snapshot) -> None:
        """Take a snapshot that exists, for one engine that has to catch up."""
        self.snapshot = snapshot
        async with self._log.stage("prepare"):
            await self._roll.each("prepare", self._limits.prepare_s, self._learn)
            self.need_one()

    async def drain(self, drain: Drain) -> None:
        """Wait for running requests to end. WaitTimeout past the limit; nothing was paused then."""
        async with (
            self._log.stage("drain"),
            Wait(f"running requests to end before {self.policy}", self._limits.drain_s),
        ):
            if faults.plan is not None:
                await faults.plan.pause("publication.drain")
            await drain()

    @asynccontextmanager
    async def draining(self) -> AsyncGenerator[None]:
        """Surround what waits for one engine's requests to end; WaitTimeout past the limit."""
        async with (
            self._log.stage("drain"),
            Wait(f"an engine to rest before {self.policy}", self._limits.drain_s),
        ):
            yield

    async def pause(self) -> None:
        """Stop decoding on every engine, in the way its facts allow."""
        self._paused_at = self._parts.clock.monotonic()

        async def one(participant: Participant) -> None:
            assert participant.plan is not None
            await participant.target.client.pause(participant.plan.pause)

        async with self._log.stage("pause"):
            if faults.plan is not None:
                await faults.plan.pause("publication.pause")
            await self._roll.each("pause", self._limits.pause_s, one)
            self.need_one()

    async def transfer(self) -> None:
        """Move the weights; who reports an error is out.

        Raises:
            RunError: from the trainer's side; every engine counts as failed.
        """
        snapshot = self._the_snapshot()
        members = self._roll.sound
        flush = all(p.plan is not None and p.plan.flush for p in members)
        limit_s = self._limits.transfer_s
        async with self._log.stage("transfer"):
            if faults.plan is not None:
                await faults.plan.pause("publication.transfer")
            try:
                # The transport keeps the deadline itself, so that it can end the collective on all
                # sides; ours is behind it, for a transport that fails to.
                async with Wait(f"the transfer of {self.policy}", limit_s * 1.1 + 5.0):
                    outcomes = await self._parts.transport.transfer(
                        snapshot, [p.target for p in members], flush=flush, deadline_s=limit_s
                    )
            except RunError as exc:
                for participant in members:
                    participant.fail("transfer", type(exc).__name__, exc.message)
                raise
            for participant, outcome in zip(members, outcomes, strict=True):
                participant.transfer_s = outcome.elapsed_s
                if outcome.error is not None:
                    participant.fail("transfer", outcome.kind, outcome.error)
            self.need_one()
        if not flush:
            self._unflushed = [p for p in self._roll.sound if p.plan is not None and p.plan.flush]

    async def verify(self) -> None:
        """Compare every tensor on every engine with the snapshot."""
        snapshot = self._the_snapshot()

        async def one(participant: Participant) -> None:
            client, info = participant.target.client, participant.info
            assert info is not None
            check_held(snapshot, await client.checksums(), info.hash)
            if participant in self._unflushed:
                # Engines of different abilities in one publication: the transfer flushed none.
                await client.flush_cache()

        async with self._log.stage("verify"):
            if faults.plan is not None:
                await faults.plan.pause("publication.verify")
            await self._roll.each("verify", self._limits.verify_s, one)
            self.need_one()

    async def set_policy(self) -> None:
        """Name the policy on verified engines, and read it back."""

        async def one(participant: Participant) -> None:
            client = participant.target.client
            await client.set_policy(self.policy)
            found = await client.policy()
            if found != str(self.policy):
                raise EngineError(f"says it serves {found!r} after {self.policy} was set")

        async with self._log.stage("set_policy"):
            if faults.plan is not None:
                await faults.plan.pause("publication.set_policy")
            await self._roll.each("set_policy", self._limits.set_policy_s, one)
            self.need_one()

    async def kill_hung(self) -> None:
        """End engines that let a whole limit pass: no retry finds them better.

        Raises:
            PublicationFailed: if one could not be ended.
        """
        await self.kill_failed(only=WaitTimeout.__name__)

    async def kill_failed(self, *, only: str | None = None) -> None:
        """End every engine that is out and not yet gone.

        Args:
            only: class name of the error that took it out; None: whatever it was.

        Raises:
            PublicationFailed: if one could not be ended; nothing may resume beside it.
        """
        doomed = [
            p
            for p in self._roll.failed
            if p.failure is not None and not p.failure.killed and only in (None, p.failure.kind)
        ]
        if not doomed:
            return

        async def one(participant: Participant) -> None:
            failure = participant.failure
            assert failure is not None
            slot, incarnation = failure.slot, failure.incarnation
            reason = f"not verified at {self.policy}: {failure.stage}: {failure.error}"
            await self._parts.kill(slot, incarnation, reason)
            participant.failure = failure.model_copy(update={"killed": True})
            await self._parts.transport.ended(slot, incarnation)

        async with self._log.stage("kill"):
            if faults.plan is not None:
                await faults.plan.pause("publication.kill")
            left = await self._roll.each("kill", self._limits.kill_s, one, doomed)
            if left:
                found = "; ".join(f"{p.name}: {why}" for p, why in left)
                raise PublicationFailed(
                    f"{self.policy}: could not end {found}", slots=[p.target.slot for p, _ in left]
                )

    async def resume(self) -> None:
        """Let verified engines go on. One that does not answer is out; its weights are right."""

        async def one(participant: Participant) -> None:
            await participant.target.client.resume()

        async with self._log.stage("resume"):
            if faults.plan is not None:
                await faults.plan.pause("publication.resume")
            await self._roll.each("resume", self._limits.resume_s, one)
        if self._paused_at is not None:
            self._pause_s = self._parts.clock.monotonic() - self._paused_at

    def decision(
        self,
        *,
        kind: Literal["publication", "bring_up"],
        outcome: Literal["published", "failed", "abandoned"],
        previous: PolicyId | None,
        reason: str | None,
    ) -> Decision:
        """Write down what came of it."""
        snapshot = self.snapshot
        return Decision(
            kind=kind,
            epoch=self.policy.epoch,
            policy=str(self.policy),
            previous=None if previous is None else str(previous),
            mode=self._mode,
            transport=self._parts.transport.name,
            outcome=outcome,
            reason=reason,
            verified=tuple(p.verified() for p in self._roll.sound)
            if outcome == "published"
            else (),
            failed=tuple(p.failure for p in self._roll.all if p.failure is not None),
            num_tensors=0 if snapshot is None else snapshot.num_tensors,
            num_bytes=0 if snapshot is None else snapshot.num_bytes,
            stages_s=dict(self._log.elapsed_s),
            pause_s=self._pause_s,
            started_at=self._started_at,
        )

    async def _learn(self, participant: Participant) -> None:
        target = participant.target
        key = (target.slot, target.incarnation)
        info = self._parts.infos.get(key)
        if info is None:
            info = self._parts.infos[key] = await target.client.info()
        participant.info = info
        participant.plan = plan_pause(info, self._mode, self._parts.pause)

    def _the_snapshot(self) -> Snapshot:
        if self.snapshot is None:
            raise PublicationFailed(f"{self.policy} was not prepared")
        return self.snapshot

    def need_one(self) -> None:
        """Refuse to go on without a sound engine; the error names every other one.

        Raises:
            PublicationFailed: if there is none.
        """
        if self._roll.sound:
            return
        found = "; ".join(
            f"{p.name}: {p.failure.stage}: {p.failure.kind}: {p.failure.error}"
            for p in self._roll.all
            if p.failure is not None
        )
        raise PublicationFailed(
            f"no engine was verified at {self.policy}: {found or 'there is no engine'}",
            policy=str(self.policy),
            failed=[p.failure.model_dump() for p in self._roll.all if p.failure is not None],
        )
