"""Copies of commits in an object store, made beside training."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.copied import knows_rewinds
from runtime.checkpoints.upload import copy_commit, make_known
from runtime.errors import ManifestConflict, StoreError
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord
from runtime.telemetry.events import Event

Say = Callable[..., None]


class Uploads:
    """Copies commits beside training, one at a time; of those that wait only the newest counts.

    A store that is away ends nothing: it is said, and the next commit brings everything along.

    Args:
        root: the output root.
        bucket: where to.
        keep: see ``upload``.
        record: told what came of each, as ``LifecycleLog.record``.
    """

    def __init__(self, root: RunRoot, bucket: Bucket, *, keep: int, record: Say) -> None:
        self._record = record
        self._root = root
        self._bucket = bucket
        self._keep = keep
        self._news = anyio.Event()
        self._wanted: CommitRecord | None = None
        self._one_at_a_time = anyio.Lock()
        self.copied: CommitRecord | None = None
        """The newest commit whose copy is whole."""

    @property
    def pinned(self) -> set[str]:
        """Policy ids whose files retention must leave: they are being copied, or will be."""
        return set() if self._wanted is None else {self._wanted.policy}

    def committed(self, commit: CommitRecord) -> None:
        """A commit stands: copy it, in place of an older one that was not begun."""
        self._wanted = commit
        self._news.set()

    async def tell_rewinds(self) -> None:
        """Return once the store knows what was undone in this run. Idempotent; before all else.

        Nothing may be made of an epoch that undid something before that: were the machine lost, the
        next one would take up from the store what was undone. A run without a rewind, and one whose
        rewinds are known to be told, asks nothing of the store.

        Raises:
            StoreError: if the store, or the disk, did not take it; asked again, it goes on.
            ManifestConflict: if another history stands in the store.
        """
        if not await anyio.to_thread.run_sync(self._knows_rewinds):
            await self._make_known()

    async def run(self) -> None:
        """Let the store know of this epoch, then copy commits, until cancelled.

        A store that is away learns of the epoch with its first commit.

        Raises:
            ManifestConflict: if another history stands in the store.
        """
        try:
            await self._make_known()
        except ManifestConflict:
            raise
        except StoreError as error:
            self._record(Event.CHECKPOINT_UPLOAD_FAILED, error=error.message)
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            await self._copy_newest()

    async def settle(self) -> bool:
        """Copy what is not copied yet, once more; whether everything is. After ``run`` has ended.

        A copy takes as long as it takes: every call of the store has a limit of its own.
        """
        await self._copy_newest()
        return self._wanted is None

    async def _make_known(self) -> None:
        async with self._one_at_a_time:
            is_news = await anyio.to_thread.run_sync(self._tell)
        if is_news:
            self._record(Event.CHECKPOINT_REWIND_KNOWN, store=str(self._bucket))

    def _tell(self) -> bool:
        """Whether what was undone was not known to be told before."""
        is_news = not self._knows_rewinds()
        make_known(self._root, self._bucket, keep=self._keep)
        return is_news

    def _knows_rewinds(self) -> bool:
        return knows_rewinds(self._root, Chain(self._root).read(), store=str(self._bucket))

    async def _copy_newest(self) -> None:
        async with self._one_at_a_time:
            await self._copy_wanted()

    async def _copy_wanted(self) -> None:
        commit = self._wanted
        if commit is None:
            return
        try:
            sent = await anyio.to_thread.run_sync(self._upload, commit)
        except ManifestConflict:
            raise
        except StoreError as error:
            self._record(Event.CHECKPOINT_UPLOAD_FAILED, update=commit.update, error=error.message)
            return
        self.copied = commit
        if self._wanted is commit:
            self._wanted = None
        self._record(
            Event.CHECKPOINT_UPLOADED, update=commit.update, policy=commit.policy, num_bytes=sent
        )

    def _upload(self, commit: CommitRecord) -> int:
        return copy_commit(self._root, self._bucket, commit, keep=self._keep)
