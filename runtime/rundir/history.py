"""Committed history: pure functions of the chain's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.policy import PolicyId
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord, Record

Records = Sequence[Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """An epoch that restored less than was committed before it."""

    epoch: int
    """The epoch that began with it."""
    seq: int
    """Where in the chain its record stands."""
    was: int
    """Newest update committed until then."""
    to: int
    """The update restored; -1 for a start from nothing."""


def newest_epoch(records: Records) -> EpochRecord | None:
    """The epoch that owns the run, or owned it last; None for an empty chain."""
    for record in reversed(records):
        if isinstance(record, EpochRecord):
            return record
    return None


def current_end(records: Records) -> EndRecord | None:
    """How the newest epoch ended; None while it has no end record."""
    for record in reversed(records):
        if isinstance(record, EpochRecord):
            return None
        if isinstance(record, EndRecord):
            return record
    return None


def is_complete(records: Records) -> bool:
    """The newest epoch ended the run. A later epoch would have taken it up again."""
    end = current_end(records)
    return end is not None and end.state == "complete"


def is_standing(records: Records, policy: PolicyId) -> bool:
    """Whether what was made at (epoch, update) belongs to history or to the current epoch.

    It stands if every later epoch restored at least that update. Whether the update itself is
    committed yet is another question: ask ``committed_update``.
    """
    newest = newest_epoch(records)
    if newest is None or policy.epoch > newest.epoch:
        return False
    return all(
        record.restored_update >= policy.update
        for record in records
        if isinstance(record, EpochRecord) and record.epoch > policy.epoch
    )


def standing_commits(records: Records) -> tuple[CommitRecord, ...]:
    """The commits that belong to history, oldest first; their updates ascend."""
    standing: list[CommitRecord] = []
    floor: float = float("inf")
    for record in reversed(records):
        if isinstance(record, EpochRecord):
            floor = min(floor, record.restored_update)
        elif isinstance(record, CommitRecord) and record.update <= floor:
            standing.append(record)
    return tuple(reversed(standing))


def newest_commit(records: Records) -> CommitRecord | None:
    """The newest commit of history; None before commit 0."""
    standing = standing_commits(records)
    return standing[-1] if standing else None


def committed_update(records: Records) -> int:
    """Update of the newest commit of history, or -1."""
    commit = newest_commit(records)
    return commit.update if commit else -1


def restored_commit(records: Records) -> CommitRecord | None:
    """The commit that the newest epoch names as the one it restores; None for a fresh start."""
    epoch = newest_epoch(records)
    if epoch is None or epoch.restored_seq is None:
        return None
    record = records[epoch.restored_seq]
    if not isinstance(record, CommitRecord):
        raise ValueError(f"epoch {epoch.epoch} restored record {record.seq}, which is no commit")
    return record


def rewinds(records: Records) -> tuple[Rewind, ...]:
    """Epochs that made committed updates undone, in order; none of them in a run without damage."""
    found: list[Rewind] = []
    for i, record in enumerate(records):
        if isinstance(record, EpochRecord):
            was = committed_update(records[:i])
            if record.restored_update < was:
                found.append(Rewind(epoch=record.epoch, seq=i, was=was, to=record.restored_update))
    return tuple(found)


def since_commit(records: Records) -> Records:
    """The records after the newest commit of history; all of them before commit 0."""
    commit = newest_commit(records)
    return records if commit is None else records[commit.seq + 1 :]


def failures_since_commit(records: Records) -> Counter[str]:
    """How often each failure ended an epoch since the newest commit, by fingerprint.

    Exempt failures (preemption, interruption, serving errors of groups) are not counted.
    """
    return Counter(
        record.failure.fingerprint
        for record in since_commit(records)
        if isinstance(record, EndRecord) and record.failure and not record.failure.is_exempt
    )


def is_deterministic(records: Records, fingerprint: str) -> bool:
    """The same failure ended two epochs with no commit in between: trying again burns GPUs."""
    return failures_since_commit(records)[fingerprint] >= 2


def restarts_since_commit(records: Records) -> int:
    """Epochs begun since the newest commit, the very first start aside."""
    begun = sum(isinstance(record, EpochRecord) for record in since_commit(records))
    return begun if newest_commit(records) else max(0, begun - 1)
