"""Copies of commits in an object store, from which a run goes on when its machine is gone.

The names are those of the output root. The epoch first, files next, then the chain's records up to
the commit: a commit is seen once its copy is whole, and nothing bears the number of an epoch that
the store does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.chain_copy import ChainCopy
from runtime.checkpoints.copied import write_copied, write_known
from runtime.checkpoints.evidence_copy import send_evidence
from runtime.checkpoints.files import locate
from runtime.clock import Clock, SystemClock
from runtime.errors import PartialWrite
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, EpochRecord, Record


def upload(root: RunRoot, bucket: Bucket, commit: CommitRecord, *, keep: int) -> int:
    """Copy one commit with everything before it that is not there yet. Idempotent.

    Of the newest commit the epochs begun since are told too, and by that what they undid.

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
    records = Chain(root).read()
    copy = ChainCopy(root, bucket)
    owner = history.newest_epoch(records[: commit.seq])
    assert owner is not None  # whoever commits has begun an epoch
    _tell(root, bucket, copy, owner)
    sent = send_evidence(root, bucket, up_to_epoch=owner.epoch)
    ledger = set(bucket.names("ledger/"))
    for each in _parents(records, commit):
        sent += _send_files(root, bucket, each, ledger=ledger, is_whole=each is commit)
    copy.extend(commit)
    newest = history.newest_epoch(records)
    if newest is not None and newest is not owner and history.newest_commit(records) == commit:
        copy.extend(newest)
        sent += send_evidence(root, bucket, up_to_epoch=newest.epoch)
    _retain(root, bucket, commit, keep=keep)
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


def make_known(root: RunRoot, bucket: Bucket, *, keep: int, clock: Clock | None = None) -> None:
    """Let the store know of every epoch that was begun here, and of what it undid. Idempotent.

    What a rewind restored is made whole there first. So a machine that starts empty goes on from
    what was undone or from what was restored, and never from less; once this has returned, never
    from what was undone.

    Args:
        root: the output root.
        bucket: where to.
        keep: see ``upload``.
        clock: for the receipts.

    Raises:
        StoreError: as ``copy_commit``; asked again, it goes on from there.
        ManifestConflict: if another history stands in the store: a second owner was faster.
    """
    records = Chain(root).read()
    epoch, commit = history.newest_epoch(records), history.newest_commit(records)
    if epoch is None:
        return
    copy, rewinds = ChainCopy(root, bucket), history.rewinds(records)
    if commit is not None and rewinds and rewinds[-1].seq >= copy.num_records:
        copy_commit(root, bucket, commit, keep=keep, clock=clock)
    _tell(root, bucket, copy, epoch)
    now = (clock or SystemClock()).time()
    write_known(root, epoch, store=str(bucket), time=now)


def _tell(root: RunRoot, bucket: Bucket, copy: ChainCopy, epoch: EpochRecord) -> None:
    """Let the store know the chain up to an epoch; commit 0, which is small, is whole there first.

    So whatever commits are known and not copied yet, there is always one to go on from.
    """
    records = Chain(root).read()[: epoch.seq]
    first = next((each for each in records if isinstance(each, CommitRecord)), None)
    if first is not None and first.seq >= copy.num_records:
        owner = history.newest_epoch(records[: first.seq])
        assert owner is not None  # whoever commits has begun an epoch
        copy.extend(owner)
        _send_files(root, bucket, first, ledger=set(), is_whole=True)
    copy.extend(epoch)


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
        name = path.relative_to(root.path).as_posix()
        is_ledger = entry.name.startswith("ledger/")
        if name in ledger or not (is_ledger or is_whole or commit.parent_seq is None):
            continue
        if bucket.has(name, size=entry.size, sha256=entry.sha256):
            continue
        if not path.exists():
            if is_ledger and not is_whole:
                continue  # a gap in what can be shown, on the disk as in the store
            raise PartialWrite(f"{path} is gone before it was copied", path=str(path))
        bucket.send(name, path, sha256=entry.sha256)
        sent += entry.size
    return sent


def _retain(root: RunRoot, bucket: Bucket, commit: CommitRecord, *, keep: int) -> None:
    """Delete trainer state of older commits; their records and ledger stay, as on the disk.

    The chain is read again: an owner that was passed over meanwhile, and whose commit a rewind has
    undone, would delete what the run goes on from.
    """
    standing = history.standing_commits(Chain(root).read())
    if commit not in standing:
        return
    old = [c for c in standing[: standing.index(commit) + 1][:-keep] if c.parent_seq is not None]
    there = {name.rsplit("/", 1)[0] for name in bucket.names("checkpoints/")}
    for each in old:
        if each.folder in there:
            names = [f for f in each.files if not f.name.startswith("ledger/")]
            bucket.delete([f"{each.folder}/{f.name}" for f in names])
