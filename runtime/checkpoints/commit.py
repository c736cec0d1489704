"""Commits: trainer state, ledger and policy become resumable as one, beside training.

stage (the trainer's whole stall) -> files written and synced while training goes on -> folder
renamed -> ledger segment -> ``commit`` record in the chain. Before that record there is no
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup
from pydantic import JsonValue

from runtime import faults
from runtime.checkpoints.files import FORMAT_VERSION, INITIAL, remove_folder, seal, segment_name
from runtime.checkpoints.identity import RunIdentity
from runtime.clock import Clock, SystemClock
from runtime.data.segments import LedgerSegment
from runtime.errors import StoreError
from runtime.policy import PolicyId
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, FileEntry
from runtime.telemetry.events import Event
from runtime.trainer.protocol import StagedState
from runtime.waits import Wait

_log: structlog.stdlib.BoundLogger = structlog.get_logger("checkpoints")


Digests = Mapping[str, str | None]
"""SHA-256 by a file's name, as it was while writing; None: nobody looked."""


class StateSource(Protocol):
    """The trainer group, as a commit sees it."""

    async def stage(self) -> Sequence[StagedState]:
        """Copy the state of all ranks to host memory; one entry per rank, by rank."""
        ...

    async def write_staged(self, staged: Sequence[StagedState], folder: str) -> Digests:
        """Write the copies beside training; names of all files, each in ``folder``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a boundary cost the trainer."""

    update: int
    waited_s: float
    """For the commit before, if it was still being written; 0 otherwise."""
    stall_s: float
    """The slowest rank's copy to host memory."""
    num_bytes: int
    """Of the copies of all ranks."""


class Committer:
    """Makes the commits of one epoch. At most one is being written at any time.

    Args:
        root: the output root.
        epoch: the owner's; appending under a newer one fails.
        identity: goes into every record.
        source: the trainer.
        tasks: where commits are written; a fatal error of one ends that group.
        on_committed: called on the event loop with record and segment once the record is durable
            (the ledger's ``committed``, retention, receipts).
        parent: the commit that was restored; None before commit 0.
        write_limit_s: how long a boundary waits at most for the commit before.
        before_record: awaited once the files are written: evidence of the updates before this
            commit, which nobody makes again after it. Raises nothing.
    """

    def __init__(
        self,
        *,
        root: RunRoot,
        epoch: int,
        identity: RunIdentity,
        source: StateSource,
        tasks: TaskGroup,
        on_committed: Callable[[CommitRecord, LedgerSegment], Awaitable[None]],
        parent: CommitRecord | None,
        clock: Clock | None = None,
        write_limit_s: float = 3600.0,
        before_record: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._root = root
        self._epoch = epoch
        self._identity = identity
        self._source = source
        self._tasks = tasks
        self._on_committed = on_committed
        self._parent = parent
        self._clock = clock or SystemClock()
        self._write_limit_s = write_limit_s
        self._before_record = before_record
        self._chain = Chain(root)
        self._idle = anyio.Event()
        self._idle.set()
        self._failure: StoreError | None = None
        self.num_waits = 0
        """Boundaries that had to wait for the commit before."""

    @property
    def newest(self) -> CommitRecord | None:
        """The newest commit of this run that stands; None before commit 0."""
        return self._parent

    @property
    def failure(self) -> StoreError | None:
        """Why the newest boundary's commit could not be written; None once one was again."""
        return self._failure

    async def commit_initial(
        self, segment: LedgerSegment, policy: PolicyId, model: Mapping[str, JsonValue]
    ) -> CommitRecord:
        """Make commit 0: the ledger before the first admission, and which model it begins with.

        Made already, it is returned: a retry after trouble that came behind the record.

        Args:
            segment: the ledger's snapshot, nothing admitted.
            policy: (epoch, 0).
            model: where the initial model lies and its digest; stored in ``initial.json``.

        Raises:
            FencedError: if a newer owner exists.
            DiskFull: if there is no room.
        """

        async def write(folder: Path) -> Digests:
            data = json.dumps(dict(model), indent=1, sort_keys=True).encode() + b"\n"
            await anyio.to_thread.run_sync(atomic.write_bytes, folder / INITIAL, data)
            return {INITIAL: None}

        await self._wait_idle()
        if self._parent is not None and self._parent.policy == str(policy):
            return self._parent
        await self._make_folder(policy)
        return await self._commit(policy, segment, write)

    async def boundary(self, policy: PolicyId, snapshot: Callable[[], LedgerSegment]) -> Boundary:
        """Take the state of this boundary and begin to write it; returns after the copy.

        Waits first for a commit still being written. The trainer may go on once this returns. A
        commit that cannot be written for lack of space is logged and kept in ``failure``; the next
        boundary makes it good. A policy that is committed already costs nothing.

        Args:
            policy: (epoch, update) of the trainer's weights now; its groups are marked consumed.
            snapshot: the ledger's; called after the wait, since its parent is the commit before.

        Raises:
            TrainerLost: if a rank is gone.
            WaitTimeout: if the commit before does not end.
        """
        start = self._clock.monotonic()
        await self._wait_idle()
        waited_s = self._clock.monotonic() - start
        if self._parent is not None and self._parent.policy == str(policy):
            self._failure = None  # of what follows a commit, such as retention: this one stands
            return Boundary(update=policy.update, waited_s=waited_s, stall_s=0.0, num_bytes=0)
        try:
            # Before the copy: one that is never written would hold its memory for ever.
            await self._make_folder(policy)
        except StoreError as exc:
            self._failed(policy, exc)
            return Boundary(update=policy.update, waited_s=waited_s, stall_s=0.0, num_bytes=0)
        segment = snapshot()
        staged = await self._source.stage()
        self._idle = anyio.Event()

        async def write(folder: Path) -> Digests:
            return await self._source.write_staged(staged, str(folder))

        self._tasks.start_soon(self._beside, policy, segment, write, self._idle)
        return Boundary(
            update=policy.update,
            waited_s=waited_s,
            stall_s=max((s.stall_s for s in staged), default=0.0),
            num_bytes=sum(s.bytes for s in staged),
        )

    async def settle(self) -> CommitRecord | None:
        """Wait for the commit being written, and return the newest.

        Raises:
            StoreError: if the newest boundary's commit could not be written.
            WaitTimeout: if it does not end.
        """
        await self._until_written()
        if self._failure is not None:
            raise self._failure
        return self._parent

    async def _wait_idle(self) -> None:
        if not self._idle.is_set():
            self.num_waits += 1
            await self._until_written()

    async def _until_written(self) -> None:
        async with Wait("the checkpoint being written", self._write_limit_s):
            await self._idle.wait()

    def _folders(self, policy: PolicyId) -> tuple[Path, Path]:
        """Where a commit is written, and where it lies when it is whole."""
        final = self._root.checkpoint(policy.update, self._epoch)
        return final.with_name(f".{final.name}.writing"), final

    async def _make_folder(self, policy: PolicyId) -> None:
        folder, final = self._folders(policy)
        with atomic.disk_full_as_error(folder):
            await anyio.to_thread.run_sync(_fresh, folder, final)

    def _failed(self, policy: PolicyId, error: StoreError) -> None:
        """No checkpoint, and none is pretended: the next boundary takes the whole state again."""
        self._failure = error
        _log.error(Event.CHECKPOINT_FAILED, policy=str(policy), error=error.message)

    async def _beside(
        self,
        policy: PolicyId,
        segment: LedgerSegment,
        write: Callable[[Path], Awaitable[Digests]],
        idle: anyio.Event,
    ) -> None:
        try:
            await self._commit(policy, segment, write)
        except StoreError as exc:
            self._failed(policy, exc)
        finally:
            idle.set()

    async def _commit(
        self,
        policy: PolicyId,
        segment: LedgerSegment,
        write: Callable[[Path], Awaitable[Digests]],
    ) -> CommitRecord:
        start = self._clock.monotonic()
        folder, final = self._folders(policy)
        try:
            if faults.plan is not None:
                await faults.plan.pause("commit.begin")
            with atomic.disk_full_as_error(folder):
                names = await write(folder)
                if self._before_record is not None:
                    await self._before_record()
                record = await anyio.to_thread.run_sync(self._seal, policy, segment, names, start)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._discard, folder, final)
            raise
        self._parent = record
        self._failure = None
        if faults.plan is not None:
            await faults.plan.pause("commit.recorded")
        _log.info(
            Event.CHECKPOINT_COMMITTED,
            policy=str(policy),
            elapsed_s=round(self._clock.monotonic() - start, 3),
            num_bytes=sum(f.size for f in record.files),
        )
        await self._on_committed(record, segment)
        return record

    def _seal(
        self, policy: PolicyId, segment: LedgerSegment, names: Digests, start: float
    ) -> CommitRecord:
        """Everything from written files to the record in the chain; runs in a thread."""
        folder, final = self._folders(policy)
        files = seal([(name, folder / name) for name in sorted(names)], names)
        atomic.fsync_folder(folder)
        atomic.point("rename", folder)
        folder.rename(final)
        atomic.fsync_folder(final.parent)
        entry = self._write_segment(policy, segment)
        self._chain.read()
        return self._append(
            CommitRecord(
                epoch=self._epoch,
                time=self._clock.time(),
                format_version=FORMAT_VERSION,
                update=policy.update,
                policy=str(policy),
                training_digest=self._identity.training_digest,
                layout=dict(self._identity.layout),
                data_fingerprint=self._identity.data_fingerprint,
                ledger_checksum=segment.checksum(),
                consumed_digest=segment.digest,
                folder=str(final.relative_to(self._root.path)),
                files=(*files, entry),
                parent_seq=None if self._parent is None else self._parent.seq,
                detail={"write_s": round(self._clock.monotonic() - start, 3)},
            )
        )

    def _append(self, record: CommitRecord) -> CommitRecord:
        if faults.plan is not None:
            faults.plan.reach("commit.record")
        try:
            return self._chain.append(record)
        except StoreError:
            # The append can fail after the record became visible. Whoever reads the chain counts
            # it then, so the ledger must too, or the next segment would hold the same ends again.
            newest = self._chain.seen[-1]
            if isinstance(newest, CommitRecord) and newest.folder == record.folder:
                return newest
            raise

    def _write_segment(self, policy: PolicyId, segment: LedgerSegment) -> FileEntry:
        if faults.plan is not None:
            faults.plan.reach("ledger.segment")
        name = segment_name(policy.update, self._epoch)
        path = self._root.path / name
        path.parent.mkdir(exist_ok=True)
        atomic.write_bytes(path, segment.to_bytes(), durable=True)
        atomic.fsync_folder(self._root.path)
        return seal([(name, path)])[0]

    def _discard(self, folder: Path, final: Path) -> None:
        """Give the space of a failed write back; what cannot be removed is left to retention."""
        try:
            remove_folder(folder)
            remove_folder(final)
        except (OSError, StoreError) as exc:
            _log.warning("checkpoint.leftover", path=str(folder), error=str(exc))


def _fresh(folder: Path, final: Path) -> None:
    """Make an empty folder to write into; what an earlier try of this commit left goes first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_folder(folder)
    remove_folder(final)
    atomic.point("mkdir", folder)
    folder.mkdir()
