"""The disk transport: the trainer writes a folder of safetensors, each engine loads it.

Folders are scratch in memory where the host has it. Two take turns, so that the published snapshot
stays readable for a restarted engine while the next one is written. Engines copy what they read
before they answer (docs/engine-contract.md): a folder that was let go is written over in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from runtime.errors import EngineRefused, PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.protocol import Snapshot, Target, TransferOutcome
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
    def checksums(self) -> dict[str, str]:
        """By HF name, as they left the trainer."""
        ...


class WeightSource(Protocol):
    """The trainer group, as this transport sees it."""

    async def write_snapshot(self, folder: str) -> Written:
        """Write the current weights into ``folder`` (``runtime.publication.snapshot``)."""
        ...


@dataclass(slots=True, eq=False)
class _Folder:
    path: Path
    readers: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """Incarnations that were told to load it and have not answered."""
    is_wanted: bool = True
    """A publication may still need it."""


class DiskTransport:
    """Implements PublicationTransport over files.

    Args:
        source: writes snapshots.
        root: where scratch folders lie; None chooses memory. On several hosts a shared folder.
    """

    name = "disk"
    brings_up_one = True

    def __init__(self, source: WeightSource, root: Path | None = None) -> None:
        self._source = source
        base = root or scratch_root()
        self.swept = sweep(base)
        """Folders of dead owners that were deleted at the start."""
        self._scratch = Scratch(base)
        self._num_made = 0
        self._folders: list[_Folder] = []
        self._current: dict[PolicyId, _Folder] = {}

    async def prepare(self, policy: PolicyId) -> Snapshot:
        """Have the trainer write the snapshot into a folder nobody reads."""
        folder = self._free_folder()
        try:
            written = await self._source.write_snapshot(str(folder.path))
        except BaseException:
            folder.is_wanted = False
            raise
        # A snapshot of the same policy serves restarted engines until this one stands.
        await self.release(policy)
        self._current[policy] = folder
        return Snapshot(
            policy=policy,
            num_tensors=written.num_tensors,
            num_bytes=written.num_bytes,
            checksums=written.checksums,
            path=str(folder.path),
        )

    async def transfer(
        self, snapshot: Snapshot, targets: Sequence[Target], *, flush: bool, deadline_s: float
    ) -> list[TransferOutcome]:
        """Tell every engine to load the folder, side by side."""
        folder = self._current.get(snapshot.policy)
        if folder is None:
            raise PublicationFailed(f"the snapshot of {snapshot.policy} was released")
        outcomes: dict[int, TransferOutcome] = {}

        async def load(target: Target) -> None:
            outcomes[target.slot] = await self._load(folder, snapshot, target, flush, deadline_s)

        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(load, target)
        return [outcomes[target.slot] for target in targets]

    async def release(self, policy: PolicyId) -> None:
        """Let the snapshot's folder be written over once its last reader is gone."""
        folder = self._current.pop(policy, None)
        if folder is not None:
            folder.is_wanted = False

    async def ended(self, slot: int, incarnation: str) -> None:
        """A dead engine reads nothing; nor does one that answered."""
        for folder in self._folders:
            folder.readers.discard((slot, incarnation))

    async def close(self) -> None:
        """Delete all folders."""
        self._current.clear()
        self._folders.clear()
        await anyio.to_thread.run_sync(self._scratch.close)

    def _free_folder(self) -> _Folder:
        for folder in self._folders:
            if not folder.is_wanted and not folder.readers:
                folder.is_wanted = True
                return folder
        folder = _Folder(self._scratch.path / str(self._num_made))
        self._num_made += 1
        folder.path.mkdir()
        self._folders.append(folder)
        return folder

    async def _load(
        self, folder: _Folder, snapshot: Snapshot, target: Target, flush: bool, deadline_s: float
    ) -> TransferOutcome:
        reader = (target.slot, target.incarnation)
        folder.readers.add(reader)
        start = anyio.current_time()
        error: Exception | None = None
        try:
            async with Wait(f"engine {target.slot} to load {snapshot.policy}", deadline_s):
                await target.client.update_from_disk(str(folder.path), snapshot.policy, flush=flush)
        except Exception as exc:  # one engine's failure is an outcome, whatever its client raised
            error = exc
        if error is None or isinstance(error, EngineRefused):
            # An engine that answered reads nothing any more; one that did not may still do so.
            await self.ended(*reader)
        return TransferOutcome(
            slot=target.slot,
            error=None if error is None else f"folder {folder.path.name}: {error}",
            elapsed_s=anyio.current_time() - start,
            kind="" if error is None else type(error).__name__,
        )
