"""The disk transport: the trainer writes a folder of safetensors, each engine loads it.

Folders are scratch in memory where the host has it. Two take turns, so that the published snapshot
stays readable for a restarted engine while the next one is written. Engines copy what they read
before they answer (docs/engine-contract.md): a folder that was let go is written over in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from runtime.engines.protocol import WeightHash
from runtime.engines.weight_folder import check_folder
from runtime.errors import EngineRefused, PartialWrite, PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.places import Place, Places
from runtime.publication.protocol import ONLY_SHA256, Snapshot, Target, TransferOutcome
from runtime.publication.scratch import Scratch, scratch_root, sweep
from runtime.waits import Wait


class Written(Protocol):
    """What a weight source says about what it wrote."""

    @property
    def num_tensors(self) -> int:
        """Tensors in the folder."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of their data."""
        ...

    @property
    def digests(self) -> Mapping[WeightHash, Mapping[str, str]]:
        """As they left the trainer, by each kind that was asked for."""
        ...

    @property
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 by HF name, where it was asked for."""
        ...


class WeightSource(Protocol):
    """The trainer group, as this transport sees it."""

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Written:
        """Write the current weights into ``folder`` (``runtime.publication.snapshot``)."""
        ...


class DiskTransport:
    """Implements PublicationTransport over files.

    Args:
        source: writes snapshots.
        root: where scratch folders lie; None chooses memory. On several hosts a shared folder.
        diagnostics: told of each step.
    """

    name = "disk"
    brings_up_one = True

    def __init__(
        self, source: WeightSource, root: Path | None = None, diagnostics: Diagnostics | None = None
    ) -> None:
        self._source = source
        base = root or scratch_root()
        self.swept = sweep(base)
        """Folders of dead owners that were deleted at the start."""
        self._scratch = Scratch(base)
        self._places = Places()
        self._diagnostics = diagnostics or Diagnostics.off()

    async def prepare(
        self, policy: PolicyId, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Snapshot:
        """Have the trainer write the snapshot into a folder nobody reads.

        Raises:
            PartialWrite: if the folder does not hold what the trainer says it wrote.
        """
        place = self._places.take()
        folder = self._folder(place)
        folder.mkdir(exist_ok=True)
        try:
            with self._diagnostics.step("export", policy=policy):
                written = await self._source.write_snapshot(str(folder), kinds)
                if written.num_tensors:  # a trainer that has none to give is refused further up
                    await anyio.to_thread.run_sync(check_folder, folder, _names(written))
        except BaseException:
            place.is_wanted = False
            raise
        # A snapshot of the same policy serves restarted engines until this one stands.
        self._places.hold(policy, place)
        return Snapshot(
            policy=policy,
            num_tensors=written.num_tensors,
            num_bytes=written.num_bytes,
            digests=written.digests,
            path=str(folder),
        )

    async def transfer(
        self, snapshot: Snapshot, targets: Sequence[Target], *, flush: bool, deadline_s: float
    ) -> list[TransferOutcome]:
        """Tell every engine to load the folder, side by side."""
        place = self._places.of(snapshot.policy)
        if place is None:
            raise PublicationFailed(f"the snapshot of {snapshot.policy} was released")
        outcomes: dict[int, TransferOutcome] = {}

        async def load(target: Target) -> None:
            outcomes[target.slot] = await self._load(place, snapshot, target, flush, deadline_s)

        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(load, target)
        return [outcomes[target.slot] for target in targets]

    async def release(self, policy: PolicyId) -> None:
        """Let the snapshot's folder be written over once its last reader is gone."""
        self._places.release(policy)

    async def ended(self, slot: int, incarnation: str) -> None:
        """A dead engine reads nothing; nor does one that answered."""
        self._places.ended((slot, incarnation))

    async def close(self) -> None:
        """Delete all folders."""
        self._places.clear()
        await anyio.to_thread.run_sync(self._scratch.close)

    async def _order(self, target: Target, folder: str, policy: PolicyId, *, flush: bool) -> None:
        """Tell one engine to load the folder."""
        await target.client.update_from_disk(folder, policy, flush=flush)

    def _folder(self, place: Place) -> Path:
        return self._scratch.path / str(place.number)

    async def _load(
        self, place: Place, snapshot: Snapshot, target: Target, flush: bool, deadline_s: float
    ) -> TransferOutcome:
        reader = (target.slot, target.incarnation)
        folder = self._folder(place)
        place.readers.add(reader)
        start = anyio.current_time()
        error: Exception | None = None
        try:
            async with Wait(f"engine {target.slot} to load {snapshot.policy}", deadline_s):
                with self._diagnostics.step("load", target=target, policy=snapshot.policy):
                    await self._order(target, str(folder), snapshot.policy, flush=flush)
        except Exception as exc:  # one engine's failure is an outcome, whatever its client raised
            error = exc
        if error is None or isinstance(error, EngineRefused | PartialWrite):
            # An engine that answered reads nothing any more, nor does one that was not asked; one
            # that did not answer may still do so.
            await self.ended(*reader)
        return TransferOutcome(
            slot=target.slot,
            error=None if error is None else f"folder {folder.name}: {error}",
            elapsed_s=anyio.current_time() - start,
            kind="" if error is None else type(error).__name__,
        )


def _names(written: Written) -> Collection[str] | None:
    """Weights that the trainer counted into its digests; None where it was asked for none."""
    return next((sums.keys() for sums in written.digests.values()), None)
