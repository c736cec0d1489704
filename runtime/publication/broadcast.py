"""The broadcast transport: a collective from the trainer's rank 0 to all engines, by buckets.

The HTTP answers of the engines are awaited beside each broadcast. Whoever errs first is out: the
collective is aborted on all sides, the group is rebuilt without it, and the transfer begins anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio
import structlog

from runtime import faults
from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.errors import EngineRefused, PublicationFailed, RunError, WaitTimeout
from runtime.policy import PolicyId
from runtime.publication.collective_step import Blame, CollectiveStep, Reason, reason_of
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.groups import GroupPlan, members_of, plan_group
from runtime.publication.protocol import ONLY_SHA256, Snapshot, Target, TransferOutcome
from runtime.publication.update_sessions import UpdateSessions
from runtime.waits import Wait, stretched

_log: structlog.stdlib.BoundLogger = structlog.get_logger("publication")


class Described(Protocol):
    """What a broadcast will carry (``sender.Description``)."""

    @property
    def num_tensors(self) -> int:
        """Tensors of all buckets."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of their data."""
        ...

    @property
    def digests(self) -> Mapping[WeightHash, Mapping[str, str]]:
        """By each kind that was asked for."""
        ...

    @property
    def buckets(self) -> Sequence[Sequence[TensorSpec]]:
        """Specs of each bucket, in order."""
        ...


class BroadcastSource(Protocol):
    """The trainer group, as this transport sees it: ``BroadcastSender`` on every rank."""

    async def describe(self, kinds: frozenset[WeightHash]) -> Described:
        """Specs by bucket and digests of the current weights."""
        ...

    async def free_port(self, host: str) -> int:
        """A free port where rank 0 runs; it keeps it for the group that is opened next."""
        ...

    async def open_group(self, plan: GroupPlan, timeout_s: float) -> None:
        """Join as rank 0; returns when all have joined."""
        ...

    async def send_bucket(self, index: int, flat: bool, count: int = 1) -> None:
        """Broadcast ``count`` buckets from ``index`` on; returns when they are sent.

        Each is one run of bytes if ``flat``.
        """
        ...

    async def abort(self) -> None:
        """Leave the group; may be called while ``send_bucket`` runs, which then fails."""
        ...


class BroadcastTransport:
    """Implements PublicationTransport over a collective.

    Args:
        source: the trainer.
        host: an address of rank 0 that engines reach; the store of the group listens there.
        backend: ``gloo`` or ``nccl``.
        ranks_per_engine: devices of each engine.
        group_timeout_s: limit of joining a group, and of one bucket. Also how long an aborted
            collective may keep its members, so not much longer than a bucket needs.
        diagnostics: told of each step.
    """

    name = "broadcast"
    brings_up_one = False

    def __init__(
        self,
        source: BroadcastSource,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        ranks_per_engine: int = 1,
        group_timeout_s: float = 30.0,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self._source = source
        self._host = host
        self._backend = backend
        self._ranks_per_engine = ranks_per_engine
        self._group_timeout_s = stretched("publication", group_timeout_s)
        # Engines hear of an abort when the trainer's operation has timed out, at the latest.
        self._grace_s = self._group_timeout_s + 5.0
        self._group: GroupPlan | None = None
        self._clients: dict[tuple[int, str], Target] = {}
        self._described: dict[PolicyId, Described] = {}
        self._sessions = UpdateSessions()
        self._diagnostics = diagnostics or Diagnostics.off()
        self.num_groups = 0
        """Groups made so far."""

    async def prepare(
        self, policy: PolicyId, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Snapshot:
        """Describe the trainer's weights, which stand still until the publication is decided."""
        with self._diagnostics.step("export", policy=policy):
            described = self._described[policy] = await self._source.describe(kinds)
        return Snapshot(
            policy=policy,
            num_tensors=described.num_tensors,
            num_bytes=described.num_bytes,
            digests=described.digests,
            path=None,
        )

    async def transfer(
        self, snapshot: Snapshot, targets: Sequence[Target], *, flush: bool, deadline_s: float
    ) -> list[TransferOutcome]:
        """Broadcast all buckets to all targets that keep up."""
        start = anyio.current_time()
        buckets = self._described[snapshot.policy].buckets
        left = sorted(targets, key=lambda t: t.slot)
        out: dict[int, Reason] = {}
        try:
            async with Wait(f"the broadcast of {snapshot.policy}", deadline_s):
                while left:
                    culprits = await self._try(buckets, left, flush)
                    if culprits is None:
                        break
                    out.update(culprits)
                    left = [t for t in left if t.slot not in culprits]
        except (WaitTimeout, PublicationFailed) as exc:
            # Nobody in particular is to blame, and everybody may hold half of the weights.
            out.update({t.slot: reason_of(exc) for t in left})
            await self._leave()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._leave()
            raise
        elapsed_s = anyio.current_time() - start
        return [_outcome(target.slot, out.get(target.slot), elapsed_s) for target in targets]

    async def release(self, policy: PolicyId) -> None:
        """Nothing is held but a description."""
        self._described.pop(policy, None)

    async def ended(self, slot: int, incarnation: str) -> None:
        """A group with a dead member is of no use."""
        self._sessions.ended(slot, incarnation)
        if self._group is not None and (slot, incarnation) in self._group.members:
            await self._leave()

    async def close(self) -> None:
        """Leave the group on all sides."""
        await self._leave()
        self._described.clear()

    async def _try(
        self, buckets: Sequence[Sequence[TensorSpec]], members: Sequence[Target], flush: bool
    ) -> dict[int, Reason] | None:
        """Send everything once; None when it went through, else who is out before the next try.

        A group that served before may be stale in ways that show as refusals of anybody: then only
        those that are gone are out, and the next try is made over a new group.

        Raises:
            PublicationFailed: if it failed over a new group and no engine is to blame.
        """
        blame = Blame()
        is_new = self._group is None or self._group.members != members_of(members)
        # Also tells dead engines before others wait for them to join.
        await self._all(members, blame, self._sessions.begin)
        if blame.is_clean and is_new:
            await self._join(members, blame)
        if blame.is_clean:
            infos = [await target.client.info() for target in members]
            if all(info.own_broadcast for info in infos):
                await self._send_all(buckets, members, flush, blame)
            else:
                flat = all(info.flat_broadcast for info in infos)
                await self._send_each(buckets, members, flush, flat, blame)
        if blame.is_clean:
            await self._all(members, blame, self._sessions.end)
        if blame.is_clean:
            return None
        # Inside NCCL whoever waits for a dead peer waits for ever, whatever it answered before.
        for slot, reason in (await self._leave()).items():
            blame.gone.setdefault(slot, reason)
        culprits = blame.gone or (blame.refused if is_new else {})
        if is_new and not culprits:
            raise PublicationFailed(str(blame.trainer))
        return culprits

    async def _join(self, members: Sequence[Target], blame: Blame) -> None:
        await self._leave()
        plan = plan_group(
            members,
            host=self._host,
            port=await self._source.free_port(self._host),
            backend=self._backend,
            ranks_per_engine=self._ranks_per_engine,
        )
        self.num_groups += 1
        self._group = plan
        self._clients = {(t.slot, t.incarnation): t for t in members}

        async def join(target: Target) -> None:
            with self._diagnostics.step("connect", target=target, group=plan.name):
                await target.client.init_update_group(
                    host=plan.host,
                    port=plan.port,
                    rank_offset=plan.rank_offset(target.slot),
                    world_size=plan.world_size,
                    name=plan.name,
                    backend=plan.backend,
                )

        async def open_group() -> None:
            with self._diagnostics.step("connect", group=plan.name, ranks=plan.world_size):
                await self._source.open_group(plan, self._group_timeout_s)

        await self._side_by_side(members, join, open_group, blame, f"group {plan.name}")

    async def _send_all(
        self,
        buckets: Sequence[Sequence[TensorSpec]],
        members: Sequence[Target],
        flush: bool,
        blame: Blame,
    ) -> None:
        """One call for all buckets: no answer is waited for between them."""
        assert self._group is not None
        group = self._group.name
        specs = [spec for bucket in buckets for spec in bucket]
        sizes = [len(bucket) for bucket in buckets]

        async def receive(target: Target) -> None:
            with self._diagnostics.step("load", target=target, buckets=len(sizes)):
                await target.client.update_from_distributed(
                    specs, group=group, policy=None, flush=flush, flat=True, sizes=sizes
                )

        async def send() -> None:
            if faults.plan is not None:
                await faults.plan.pause("publication.bucket")
            with self._diagnostics.step("broadcast", buckets=len(sizes), group=group):
                await self._source.send_bucket(0, True, len(sizes))

        what = f"{len(sizes)} buckets over group {group}"
        await self._side_by_side(members, receive, send, blame, what)

    async def _send_each(
        self,
        buckets: Sequence[Sequence[TensorSpec]],
        members: Sequence[Target],
        flush: bool,
        flat: bool,
        blame: Blame,
    ) -> None:
        for index, specs in enumerate(buckets):
            if not blame.is_clean:
                return
            last = index == len(buckets) - 1
            await self._send(index, specs, members, flush and last, flat, blame)

    async def _send(
        self,
        index: int,
        specs: Sequence[TensorSpec],
        members: Sequence[Target],
        flush: bool,
        flat: bool,
        blame: Blame,
    ) -> None:
        assert self._group is not None
        group = self._group.name

        async def receive(target: Target) -> None:
            with self._diagnostics.step("load", target=target, bucket=index):
                await target.client.update_from_distributed(
                    specs, group=group, policy=None, flush=flush, flat=flat
                )

        async def send() -> None:
            if faults.plan is not None:
                await faults.plan.pause("publication.bucket")
            with self._diagnostics.step("broadcast", bucket=index, group=group):
                await self._source.send_bucket(index, flat)

        what = f"bucket {index} over group {group}"
        await self._side_by_side(members, receive, send, blame, what)

    async def _side_by_side(
        self,
        members: Sequence[Target],
        theirs: Callable[[Target], Awaitable[None]],
        ours: Callable[[], Awaitable[None]],
        blame: Blame,
        what: str,
    ) -> None:
        step = CollectiveStep(what, blame, abort=self._source.abort, grace_s=self._grace_s)
        await step.run(members, theirs, ours)

    async def _all(
        self,
        members: Sequence[Target],
        blame: Blame,
        call: Callable[[Target], Awaitable[None]],
    ) -> None:
        async def one(target: Target) -> None:
            try:
                await call(target)
            except Exception as exc:  # as above
                blame.gone[target.slot] = reason_of(exc)

        async with anyio.create_task_group() as tasks:
            for target in members:
                tasks.start_soon(one, target)

    async def _leave(self) -> dict[int, Reason]:
        """Destroy the group on all sides; by slot, who did not answer."""
        group, self._group = self._group, None
        lost: dict[int, Reason] = {}
        if group is None:
            return lost
        await self._source.abort()

        async def destroy(target: Target) -> None:
            try:
                async with Wait(f"engine {target.slot} to leave {group.name}", self._grace_s):
                    await target.client.destroy_update_group(group.name)
            except EngineRefused as exc:
                # It answers, and forgets the group with its next one.
                _log.debug("publication.group_left_behind", slot=target.slot, error=str(exc))
            except RunError as exc:
                lost[target.slot] = reason_of(exc)

        async with anyio.create_task_group() as tasks:
            for target in self._clients.values():
                tasks.start_soon(destroy, target)
        self._clients = {}
        return lost


def _outcome(slot: int, reason: Reason | None, elapsed_s: float) -> TransferOutcome:
    kind, error = reason or ("", None)
    return TransferOutcome(slot=slot, error=error, elapsed_s=elapsed_s, kind=kind)
