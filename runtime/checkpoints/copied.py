"""What is known here of a run's copy in an object store, by receipts.

One says which commit's copy is whole, the other of which epoch the store knows. Nobody asks the
store for either: ``status`` answers from the output root alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.checkpoints.bucket import store_name
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.receipts import Receipt, read_receipt, write_receipt
from runtime.rundir.records import CommitRecord, EpochRecord, Record

UPLOAD = "upload"
"""The step of the receipt of a copy."""
KNOWN = "known"
"""The step of the receipt of an epoch."""


def write_copied(
    root: RunRoot, commit: CommitRecord, *, store: str, num_bytes: int, time: float
) -> None:
    """Say that a commit's copy is whole. Idempotent; a receipt of a later commit stays.

    The chain says what is later. What a rewind undid counts as nothing: its receipt goes, whatever
    its epoch, and an owner that was passed over says nothing any more.

    Args:
        root: the run.
        commit: whose copy it is.
        store: as ``checkpoint.upload`` names it; credentials are no part of that.
        num_bytes: sent for it; what was there already does not count.
        time: wall seconds.

    Raises:
        DiskFull: if there was no room; copying again sends nothing and writes it.
        ChainUnreadable: if history is damaged.
    """
    commits = {each.policy: each.seq for each in history.standing_commits(Chain(root).read())}
    found = read_copied(root)
    newest = -1 if found is None else commits.get(str(found.policy), -1)
    if commit.policy not in commits or newest > commit.seq:
        return
    write_receipt(
        root,
        Receipt(
            step=UPLOAD,
            epoch=commit.epoch,
            update=commit.update,
            time=time,
            detail={"policy": commit.policy, "store": store, "num_bytes": num_bytes},
        ),
    )


def read_copied(root: RunRoot) -> Receipt | None:
    """The receipt; None where no copy is known to be whole."""
    return read_receipt(root, UPLOAD)


def is_copied(copied: Receipt | None, commit: CommitRecord, *, upload: str) -> bool:
    """Whether a receipt speaks of this commit in this store: another store's proves nothing here.

    Args:
        copied: as ``read_copied`` found it.
        commit: in question.
        upload: ``checkpoint.upload``.
    """
    return (
        copied is not None
        and str(copied.policy) == commit.policy
        and copied.detail.get("store") == store_name(upload)
    )


def write_known(root: RunRoot, epoch: EpochRecord, *, store: str, time: float) -> None:
    """Say that a store knows the chain up to an epoch. Idempotent; a later epoch's receipt stays.

    Args:
        root: the run.
        epoch: whose record stands there, after all before it.
        store: as ``str`` of its bucket says.
        time: wall seconds.

    Raises:
        DiskFull: if there was no room; telling again sends nothing and writes it.
    """
    if _known_epoch(root, store=store) < epoch.epoch:
        update = max(0, epoch.restored_update)
        write_receipt(
            root,
            Receipt(
                step=KNOWN, epoch=epoch.epoch, update=update, time=time, detail={"store": store}
            ),
        )


def knows_rewinds(root: RunRoot, records: Sequence[Record], *, store: str) -> bool:
    """Whether a store is known to know what was undone in this run; True where nothing was.

    Args:
        root: the run.
        records: the chain.
        store: as ``str`` of its bucket says: what another store knows proves nothing here.
    """
    rewinds = history.rewinds(records)
    return not rewinds or rewinds[-1].epoch <= _known_epoch(root, store=store)


def _known_epoch(root: RunRoot, *, store: str) -> int:
    found = read_receipt(root, KNOWN)
    return 0 if found is None or found.detail.get("store") != store else found.epoch
