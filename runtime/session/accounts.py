"""The ledger segments of committed history, as ``milepost ledger`` counts them."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.checkpoints.files import locate, segment_name
from runtime.data.segments import LedgerSegment
from runtime.errors import PartialWrite
from runtime.rundir.history import standing_commits
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, Record


def committed_segments(root: RunRoot, records: Sequence[Record]) -> list[LedgerSegment]:
    """The segments that the standing commits name, oldest first; empty before commit 0.

    Args:
        root: the run.
        records: the whole chain.

    Raises:
        PartialWrite: if one is missing, damaged, or not the one its commit names.
    """
    return [_segment(root, commit) for commit in standing_commits(records)]


def _segment(root: RunRoot, commit: CommitRecord) -> LedgerSegment:
    name = segment_name(commit.update, commit.epoch)
    path = locate(root, commit, name)
    try:
        segment = LedgerSegment.from_bytes(path.read_bytes())
    except OSError as error:
        raise PartialWrite(f"{path}: {error.strerror}", path=str(path)) from error
    if segment.checksum() != commit.ledger_checksum:
        raise PartialWrite(f"{path} is not the ledger that {commit.folder} names", path=str(path))
    return segment
