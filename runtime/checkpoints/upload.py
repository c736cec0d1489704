"""Copies of commits in an object store, from which a run goes on when its machine is gone.

The names are those of the output root. Files first, then the chain's records up to the commit in
their order, each only where none stands yet: the ``commit`` record is the last thing that appears,
so the copy is whole when it is seen, and of two owners on two disks one is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.copied import write_copied
from runtime.checkpoints.files import digest, locate
from runtime.clock import Clock, SystemClock
from runtime.errors import ManifestConflict, PartialWrite, StoreError
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.history import standing_commits
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, Record
from runtime.telemetry.events import Event

EVIDENCE = ("rollouts", "evaluations")
"""Folders of the output root that a finished run must show, beside its commits."""

Say = Callable[..., None]


def object_name(root: RunRoot, path: Path) -> str:
    """The name of a file of the output root in the store."""
    return path.relative_to(root.path).as_posix()


def upload(root: RunRoot, bucket: Bucket, commit: CommitRecord, *, keep: int) -> int:
    """Copy one commit with everything before it that is not there yet. Idempotent.

    Args:
        root: the output root.
        bucket: where to.
        commit: a standing one, whose files are there.
        keep: newest commits whose trainer state stays in the store; the ledger always does.

    Returns:
        Bytes sent.

    Raises:
        StoreUnreachable: if the store did not take everything; asked again, it goes on from there.
        PartialWrite: if a file is gone: retention deleted an older commit under our hands.
        ManifestConflict: if another history stands in the store.
    """
    records = Chain(root).read()[: commit.seq + 1]
    standing = {int(name[6:-5]) for name in bucket.names("chain/")}
    _check_history(root, bucket, standing)
    sent = sum(_send_evidence(root, bucket, folder) for folder in EVIDENCE)
    ledger = set(bucket.names("ledger/"))
    for each in _parents(records, commit):
        sent += _send_files(root, bucket, each, ledger=ledger, is_whole=each is commit)
    for record in records:
        if record.seq not in standing:
            _append(root, bucket, record)
    _retain(bucket, records, keep=keep)
    return sent


def copy_commit(
    root: RunRoot, bucket: Bucket, commit: CommitRecord, *, keep: int, clock: Clock | None = None
) -> int:
    """``upload``, and the receipt that says so in the output root. Idempotent; returns bytes sent.

    Raises:
        StoreError: as ``upload``, or for want of room for the receipt.
        ManifestConflict: if another history stands in the store.
    """
    sent = upload(root, bucket, commit, keep=keep)
    now = (clock or SystemClock()).time()
    write_copied(root, commit, store=str(bucket), num_bytes=sent, time=now)
    return sent


def _check_history(root: RunRoot, bucket: Bucket, standing: set[int]) -> None:
    """What is there must be ours: two histories that part nowhere have the same newest record."""
    if standing:
        name = f"chain/{max(standing)}.json"
        if bucket.read(name) != atomic.read_bytes(root.path / name):
            raise _another_history(bucket, name)


def _parents(records: Sequence[Record], commit: CommitRecord) -> list[CommitRecord]:
    """The commits whose ledger segments make up its history, oldest first, itself the last."""
    found = [commit]
    while (seq := found[-1].parent_seq) is not None:
        parent = records[seq]
        assert isinstance(parent, CommitRecord)
        found.append(parent)
    return found[::-1]


def _send_files(
    root: RunRoot, bucket: Bucket, commit: CommitRecord, *, ledger: set[str], is_whole: bool
) -> int:
    """Send its ledger; trainer state of the commit in hand and of commit 0 alone."""
    sent = 0
    for entry in commit.files:
        path = locate(root, commit, entry.name)
        name = object_name(root, path)
        is_ledger = entry.name.startswith("ledger/")
        if name in ledger or not (is_ledger or is_whole or commit.parent_seq is None):
            continue
        if bucket.has(name, size=entry.size, sha256=entry.sha256):
            continue
        if not path.exists():
            raise PartialWrite(f"{path} is gone before it was copied", path=str(path))
        bucket.send(name, path, sha256=entry.sha256)
        sent += entry.size
    return sent


def _send_evidence(root: RunRoot, bucket: Bucket, folder: str) -> int:
    """Files that are written once under names of their own; what is there stays."""
    there = set(bucket.names(f"{folder}/"))
    sent = 0
    for path in sorted((root.path / folder).rglob("*")):
        if path.is_file() and not path.name.startswith(".") and ".partial" not in path.name:
            name = object_name(root, path)
            # A log of items still grows: it is sent again; everything else has its last content.
            if name not in there or path.suffix == ".jsonl":
                bucket.send(name, path, sha256=digest(path))
                sent += path.stat().st_size
    return sent


def _append(root: RunRoot, bucket: Bucket, record: Record) -> None:
    name = f"chain/{record.seq}.json"
    data = atomic.read_bytes(root.path / name)
    assert data is not None  # it was read just now, and records never go
    if not bucket.create(name, data) and bucket.read(name) != data:
        raise _another_history(bucket, name)


def _another_history(bucket: Bucket, name: str) -> ManifestConflict:
    return ManifestConflict(
        f"{bucket}/{name} is of another history than ours: a second owner of this run has copied "
        "there, or checkpoint.upload belongs to another run",
        record=name,
    )


def _retain(bucket: Bucket, records: Sequence[Record], *, keep: int) -> None:
    """Delete trainer state of older commits; their records and ledger stay, as on the disk."""
    old = [c for c in standing_commits(records)[:-keep] if c.parent_seq is not None]
    there = {name.rsplit("/", 1)[0] for name in bucket.names("checkpoints/")}
    for commit in old:
        if commit.folder in there:
            names = [f for f in commit.files if not f.name.startswith("ledger/")]
            bucket.delete([f"{commit.folder}/{f.name}" for f in names])


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
        self._is_busy = False
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

    async def run(self) -> None:
        """Copy until cancelled.

        Raises:
            ManifestConflict: if another history stands in the store.
        """
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

    async def _copy_newest(self) -> None:
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
