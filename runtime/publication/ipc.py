"""The ipc transport: engines read the trainer's weights from memory they share with it.

On a CPU the trainer packs its weights into files in memory, on a GPU into buckets of its device
memory, which an engine on the same card opens. Two sets of buckets take turns, so that the
published snapshot stays readable for a restarted engine while the next one is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from runtime.engines.protocol import WeightHash
from runtime.engines.shared import SharedBucket
from runtime.errors import EngineRefused, PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.places import Place, Places
from runtime.publication.protocol import ONLY_SHA256, Snapshot, Target, TransferOutcome
from runtime.publication.scratch import Scratch, scratch_root, sweep
from runtime.publication.update_sessions import UpdateSessions
from runtime.waits import Wait


class Packed(Protocol):
    """What the trainer says about what it packed (``sharing.SharedWeights``)."""

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
        """Of the trainer's own tensors, by each kind that was asked for."""
        ...

    @property
    def buckets(self) -> Sequence[SharedBucket]:
        """In the order they are to be loaded."""
        ...


class IpcSource(Protocol):
    """The trainer group, as this transport sees it."""

    async def share_weights(self, place: int, folder: str, kinds: frozenset[WeightHash]) -> Packed:
        """Pack the current weights into the buckets of ``place`` (``runtime.publication.sharing``).

        ``folder`` is where files in memory go; on a GPU it stays empty.
        """
        ...


class IpcTransport:
    """Implements PublicationTransport over shared memory of one machine.

    Args:
        source: packs weights.
        root: where files in memory lie; None chooses.
        diagnostics: told of each step.
    """

    name = "ipc"
    brings_up_one = True

    def __init__(
        self, source: IpcSource, root: Path | None = None, diagnostics: Diagnostics | None = None
    ) -> None:
        self._source = source
        base = root or scratch_root()
        self.swept = sweep(base)
        """Folders of dead owners that were deleted at the start."""
        self._scratch = Scratch(base)
        self._places = Places()
        self._buckets: dict[PolicyId, tuple[SharedBucket, ...]] = {}
        self._sessions = UpdateSessions()
        self._diagnostics = diagnostics or Diagnostics.off()

    async def prepare(
        self, policy: PolicyId, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Snapshot:
        """Have the trainer pack its weights where nobody reads."""
        place = self._places.take()
        folder = self._scratch.path / str(place.number)
        folder.mkdir(exist_ok=True)
        try:
            with self._diagnostics.step("export", policy=policy):
                packed = await self._source.share_weights(place.number, str(folder), kinds)
        except BaseException:
            place.is_wanted = False
            raise
        self._places.hold(policy, place)
        self._buckets[policy] = tuple(packed.buckets)
        return Snapshot(
            policy=policy,
            num_tensors=packed.num_tensors,
            num_bytes=packed.num_bytes,
            digests=packed.digests,
            path=None,
        )

    async def transfer(
        self, snapshot: Snapshot, targets: Sequence[Target], *, flush: bool, deadline_s: float
    ) -> list[TransferOutcome]:
        """Tell every engine to load all buckets, side by side."""
        place, buckets = self._places.of(snapshot.policy), self._buckets.get(snapshot.policy)
        if place is None or buckets is None:
            raise PublicationFailed(f"the snapshot of {snapshot.policy} was released")
        outcomes: dict[int, TransferOutcome] = {}

        async def load(target: Target) -> None:
            outcomes[target.slot] = await self._load(place, buckets, target, flush, deadline_s)

        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(load, target)
        return [outcomes[target.slot] for target in targets]

    async def release(self, policy: PolicyId) -> None:
        """Let the buckets be packed again once their last reader is gone."""
        self._places.release(policy)
        self._buckets.pop(policy, None)

    async def ended(self, slot: int, incarnation: str) -> None:
        """A dead engine reads nothing, and has no session."""
        self._places.ended((slot, incarnation))
        self._sessions.ended(slot, incarnation)

    async def close(self) -> None:
        """Delete files in memory; device memory is freed by the trainer's end."""
        self._places.clear()
        self._buckets.clear()
        await anyio.to_thread.run_sync(self._scratch.close)

    async def _load_each(
        self, target: Target, buckets: Sequence[SharedBucket], flush: bool
    ) -> None:
        # Side by side: an engine takes one after the other, and no answer is waited for between
        # them. The last one comes alone, since it may flush the cache.
        async with anyio.create_task_group() as tasks:
            for index, bucket in enumerate(buckets[:-1]):
                tasks.start_soon(self._load_one, target, index, bucket, False)
        await self._load_one(target, len(buckets) - 1, buckets[-1], flush)

    async def _load_one(
        self, target: Target, index: int, bucket: SharedBucket, flush: bool
    ) -> None:
        with self._diagnostics.step("load", target=target, bucket=index):
            await target.client.update_from_shared(bucket, flush=flush)

    async def _load(
        self,
        place: Place,
        buckets: Sequence[SharedBucket],
        target: Target,
        flush: bool,
        deadline_s: float,
    ) -> TransferOutcome:
        reader = (target.slot, target.incarnation)
        place.readers.add(reader)
        start = anyio.current_time()
        error: Exception | None = None
        at = "the update session"
        try:
            async with Wait(f"engine {target.slot} to load {len(buckets)} buckets", deadline_s):
                await self._sessions.begin(target)
                at = f"the buckets of place {place.number}"
                if (await target.client.info()).own_buckets:
                    with self._diagnostics.step("load", target=target, buckets=len(buckets)):
                        await target.client.update_from_shared(*buckets, flush=flush)
                else:
                    await self._load_each(target, buckets, flush)
                await self._sessions.end(target)
        except ExceptionGroup as group:
            error = first_error(group)
        except Exception as exc:  # one engine's failure is an outcome, whatever its client raised
            error = exc
        if error is None or isinstance(error, EngineRefused):
            # An engine that answered reads nothing any more; one that did not may still do so.
            self._places.ended(reader)
        return TransferOutcome(
            slot=target.slot,
            error=None if error is None else f"{at}: {error}",
            elapsed_s=anyio.current_time() - start,
            kind="" if error is None else type(error).__name__,
        )


def first_error(group: ExceptionGroup[Exception]) -> Exception:
    """The first that is no group itself."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, ExceptionGroup) else error
