"""The transaction by which one policy becomes the published one.

prepare -> (drain) -> pause -> transfer -> verify -> set the policy id -> kill the others -> resume

Up to the kills nothing is undone except by a retry: engines that were paused stay paused, because
nobody knows what a half-loaded engine holds. One verified engine decides for the new policy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio
import structlog

from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.errors import PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.decision import Decision, append_decision
from runtime.publication.limits import PublicationLimits
from runtime.publication.pausing import PublicationMode, RefreshPause
from runtime.publication.protocol import PublicationTransport, Snapshot, Target
from runtime.publication.stage_log import StageEvent, StageLog, log_stage
from runtime.publication.swap import Decided, Drain, Kill, Swap, SwapParts
from runtime.telemetry.events import Event

_log: structlog.stdlib.BoundLogger = structlog.get_logger("publication")

Rest = Callable[[Target], Awaitable[None]]


class Publisher:
    """Publishes policies to engines, one at a time.

    Args:
        transport: how bytes travel; fixed for the run.
        kill: ends an engine that must not serve again.
        record_path: ``publications.jsonl``; one line per publication, whatever came of it.
        limits: seconds per stage, before stretching.
        pause: how ``refresh`` pauses engines that prove per-token spans.
        stage_log: gets each edge of each stage.
    """

    def __init__(
        self,
        *,
        transport: PublicationTransport,
        kill: Kill,
        record_path: Path,
        limits: PublicationLimits | None = None,
        clock: Clock | None = None,
        pause: RefreshPause = "in_place",
        stage_log: Callable[[StageEvent], None] = log_stage,
    ) -> None:
        self._transport = transport
        self._clock = clock or SystemClock()
        self._parts = SwapParts(
            transport=transport,
            kill=kill,
            limits=(limits or PublicationLimits()).stretched(),
            clock=self._clock,
            infos={},
            pause=pause,
        )
        self._record_path = record_path
        self._stage_log = stage_log
        self._lock = anyio.Lock()
        self._published: PolicyId | None = None
        self._snapshot: Snapshot | None = None
        self._is_halted = False

    @property
    def published(self) -> PolicyId | None:
        """The published policy; None before the first publication."""
        return self._published

    @property
    def brings_up_one(self) -> bool:
        """``bring_up`` works: the transport can serve a single engine from the kept snapshot."""
        return self._transport.brings_up_one

    @property
    def is_halted(self) -> bool:
        """The last publication was not decided: engines stand paused until one succeeds."""
        return self._is_halted

    async def publish(
        self,
        policy: PolicyId,
        targets: Sequence[Target],
        *,
        mode: PublicationMode,
        drain: Drain | None = None,
        rest: Rest | None = None,
        decided: Decided | None = None,
    ) -> Decision:
        """Make ``policy`` the published one on every target that can be verified.

        Returns with it published: verified engines serve it, all other targets are gone. May be
        called again after any error, with the targets of that moment; the trainer's weights stand
        still from the first call until one returns.

        Args:
            policy: what the trainer holds now.
            targets: the engines that take part; their order means nothing.
            mode: ``drain`` awaits ``drain`` first, ``refresh`` swaps under running requests,
                ``rolling`` takes engine by engine while the others serve.
            drain: needed in ``drain`` mode, not looked at otherwise.
            rest: needed in ``rolling`` mode: gives an engine no new work, and returns when it has
                none left or its time for that is up.
            decided: told before anything resumes, so that no request goes to new weights with an
                old policy as its salt; in ``rolling`` mode of each engine at its turn.

        Raises:
            PublicationFailed: if no target was verified, or one that was not could not be ended.
                The old policy stays published and nothing resumes until a retry succeeds; in
                ``rolling`` mode engines that had no turn serve it on.
            RunError: whatever the trainer's side raised (TrainerLost, DiskFull); the same
                consequence, except that before the pause engines have not been touched.
            ValueError: if a callback of the mode is missing, or the transport serves all engines
                at once in ``rolling`` mode.
        """
        if mode == "drain" and drain is None:
            raise ValueError("drain mode needs a drain callback")
        if mode == "rolling" and (rest is None or not self._transport.brings_up_one):
            raise ValueError("rolling mode needs a rest callback and a transport to one engine")
        async with self._lock:
            log = StageLog(policy, self._clock, self._stage_log)
            swap = Swap(self._parts, log, policy, targets, mode)
            stages = (
                self._publish(swap, drain, decided)
                if rest is None or mode != "rolling"
                else self._roll(swap, rest, decided)
            )
            return await self._closed("publication", swap, stages)

    async def bring_up(self, target: Target, policy: PolicyId) -> Decision:
        """Bring one restarted engine to the published policy; ``decision.policy`` says which it is.

        Waits for a publication under way. The engine is ended when it cannot be verified.

        Args:
            target: an incarnation that serves nothing yet.
            policy: what the caller believes to be published; a newer one is used instead.

        Raises:
            PublicationFailed: if the engine was not verified (it is gone then), nothing at or after
                ``policy`` is published, a publication waits for its retry, or the transport cannot
                serve a single engine.
        """
        async with self._lock:
            snapshot = self._snapshot_for(target, policy)
            log = StageLog(snapshot.policy, self._clock, self._stage_log)
            swap = Swap(self._parts, log, snapshot.policy, [target], "refresh")
            return await self._closed("bring_up", swap, self._bring_up(swap, snapshot))

    async def mend(self, target: Target, policy: PolicyId) -> Decision:
        """Bring one restarted engine to the published policy from the trainer; the others go on.

        For transports that keep no snapshot. A failure halts nothing: the engine is ended, and the
        next incarnation may try again.

        Args:
            target: an incarnation that serves nothing yet.
            policy: the published one, which the trainer holds exactly and will until this returns.

        Raises:
            PublicationFailed: if the engine was not verified (it is gone then), or a publication
                waits for its retry.
            RunError: whatever the trainer's side raised.
        """
        async with self._lock:
            if self._is_halted or policy != self._published:
                halted = ", and a publication waits for its retry" if self._is_halted else ""
                raise PublicationFailed(
                    f"engine {target.slot} cannot be mended at {policy}: published is "
                    f"{self._published}{halted}"
                )
            log = StageLog(policy, self._clock, self._stage_log)
            swap = Swap(self._parts, log, policy, [target], "refresh")
            return await self._closed("bring_up", swap, self._mend(swap))

    async def close(self) -> None:
        """Drop snapshots and groups; waits for a publication under way."""
        async with self._lock:
            self._snapshot = None
            await self._transport.close()

    async def _publish(self, swap: Swap, drain: Drain | None, decided: Decided | None) -> None:
        await swap.prepare()
        if drain is not None and not self._is_halted:
            # Halted engines stand paused: what they hold cannot end before the retry.
            await swap.drain(drain)
        self._is_halted = True
        await swap.pause()
        await swap.transfer()
        await swap.verify()
        await swap.set_policy()
        await swap.kill_failed()
        previous, self._snapshot = self._snapshot, swap.snapshot
        self._published = swap.policy
        self._is_halted = False
        if decided is not None:
            decided(swap.policy, swap.verified)
        await swap.resume()
        await self._kill_unresumed(swap)
        if previous is not None and previous.policy != swap.policy:
            await self._transport.release(previous.policy)

    async def _roll(self, swap: Swap, rest: Rest, decided: Decided | None) -> None:
        await swap.prepare()
        previous = self._snapshot

        async def turn(target: Target, one: Swap) -> None:
            async with one.draining():
                await rest(target)
            await self._load(one)
            self._snapshot, self._published = swap.snapshot, swap.policy
            if decided is not None:
                decided(swap.policy, [target])
            await one.resume()
            await one.kill_failed()

        await swap.one_by_one(turn)
        if previous is not None and previous.policy != swap.policy:
            await self._transport.release(previous.policy)

    async def _kill_unresumed(self, swap: Swap) -> None:
        """End engines that did not answer the resume; that one lives on undoes nothing.

        The publication is decided, the others serve it. What could not be ended holds the right
        weights, was taken out of routing before, and its slot's restart ends it again.
        """
        try:
            await swap.kill_failed()
        except PublicationFailed as exc:
            _log.warning(Event.PUBLICATION_KILL_FAILED, policy=str(swap.policy), error=exc.message)

    async def _bring_up(self, swap: Swap, snapshot: Snapshot) -> None:
        try:
            await swap.reuse(snapshot)
            await self._swap_in(swap)
        finally:
            await swap.kill_failed()

    async def _mend(self, swap: Swap) -> None:
        try:
            await swap.prepare()
            await self._swap_in(swap)
        finally:
            await swap.kill_failed()

    async def _swap_in(self, swap: Swap) -> None:
        await self._load(swap)
        await swap.resume()

    async def _load(self, swap: Swap) -> None:
        await swap.pause()
        await swap.transfer()
        await swap.verify()
        await swap.set_policy()

    def _snapshot_for(self, target: Target, policy: PolicyId) -> Snapshot:
        if not self._transport.brings_up_one:
            raise PublicationFailed(
                f"transport {self._transport.name} serves all engines at once: "
                f"engine {target.slot} joins at the next publication"
            )
        if self._is_halted:
            raise PublicationFailed(
                f"engine {target.slot} cannot join: a publication waits for its retry"
            )
        if self._snapshot is None or self._snapshot.policy < policy:
            raise PublicationFailed(
                f"engine {target.slot} asks for {policy}; published is {self._published}"
            )
        return self._snapshot

    async def _closed(
        self, kind: Literal["publication", "bring_up"], swap: Swap, stages: Awaitable[None]
    ) -> Decision:
        """Run the stages and write the record, whatever comes of them."""
        previous = self._published
        try:
            await stages
        except Exception as exc:
            if kind == "publication":
                with suppress(PublicationFailed):  # what could not be ended is the monitor's now
                    await swap.kill_hung()
            self._record(
                swap.decision(kind=kind, outcome="failed", previous=previous, reason=str(exc))
            )
            if kind == "publication" and swap.snapshot not in (None, self._snapshot):
                await self._transport.release(swap.policy)
            raise
        except BaseException as exc:
            name = type(exc).__name__
            self._record(
                swap.decision(kind=kind, outcome="abandoned", previous=previous, reason=name)
            )
            raise
        decision = swap.decision(kind=kind, outcome="published", previous=previous, reason=None)
        self._record(decision)
        return decision

    def _record(self, decision: Decision) -> None:
        if faults.plan is not None:
            faults.plan.reach("publication.record")
        facts = decision.model_dump(mode="json", exclude={"schema_version"})
        if decision.outcome == "published":
            _log.info(Event.PUBLICATION_COMMITTED, **facts)
        else:
            _log.warning(Event.PUBLICATION_FAILED, **facts)
        try:
            append_decision(self._record_path, decision)
        except OSError as exc:
            # Telemetry: a full disk must not undo what engines already serve.
            _log.warning("publication.record_dropped", error=str(exc), policy=decision.policy)
