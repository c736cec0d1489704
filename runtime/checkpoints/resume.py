"""Which commit a new epoch goes on from, and that what was restored is what was committed.

Reads files, writes nothing, and needs neither Ray nor torch: the guard calls it before it appends
its ``epoch`` record, which names the commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoints.files import FORMAT_VERSION, INITIAL, damage, locate, segment_name
from runtime.data.segments import LedgerSegment
from runtime.errors import ContractViolation, PartialWrite, RetryBy, StoreError
from runtime.policy import PolicyId
from runtime.rundir.history import standing_commits
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, Record


class NoValidCommit(StoreError):
    """The chain has commits, and none of them can be restored."""

    retry = RetryBy.NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCommit:
    """A commit that was passed over. Its files stay where they are."""

    commit: CommitRecord
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.commit.folder} ({self.commit.policy}): {'; '.join(self.problems)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorable:
    """The newest commit whose files are all as its record says."""

    commit: CommitRecord
    folder: Path
    """Of the trainer's state; holds only ``initial.json`` when ``initial`` is given."""
    initial: Mapping[str, object] | None
    """What commit 0 says about the initial model; None when there is trainer state to restore."""
    segments: tuple[LedgerSegment, ...]
    """Ledger history, oldest first, back to commit 0 or to ``history_gap``. Never empty."""
    history_gap: str | None
    """An older segment that cannot be read; training can go on, history cannot be shown whole."""
    damaged: tuple[DamagedCommit, ...]
    """Newer commits that were passed over, newest first."""

    @property
    def policy(self) -> PolicyId:
        """The committed policy."""
        return PolicyId.parse(self.commit.policy)


def find_restorable(root: RunRoot, records: Sequence[Record]) -> Restorable | None:
    """Find the newest valid commit of committed history.

    Reads every byte of the candidates it looks at.

    Args:
        root: the output root.
        records: the chain, as just read.

    Returns:
        None when history has no commit: the run starts fresh.

    Raises:
        NoValidCommit: if there are commits and none is valid; says what was found in each.
    """
    commits = standing_commits(records)
    if not commits:
        return None
    damaged: list[DamagedCommit] = []
    for commit in reversed(commits):
        problems = _problems(root, commit)
        if not problems:
            segments, gap = _segments(root, records, commit)
            folder = root.path / commit.folder
            return Restorable(
                commit=commit,
                folder=folder,
                initial=_initial(folder),
                segments=segments,
                history_gap=gap,
                damaged=tuple(damaged),
            )
        damaged.append(DamagedCommit(commit=commit, problems=tuple(problems)))
    found = " | ".join(str(d) for d in damaged)
    raise NoValidCommit(
        f"none of {len(commits)} commits can be restored: {found}. Restore the files from a copy; "
        "a run without a valid commit is not started over on its own",
        commits=[c.folder for c in commits],
    )


def restorable_at(root: RunRoot, records: Sequence[Record], update: int) -> Restorable | None:
    """The commit of history at exactly ``update``, every byte of it looked at.

    Returns:
        None when history has no commit there, or retention deleted its files.

    Raises:
        PartialWrite: if its files are there and damaged.
    """
    for commit in standing_commits(records):
        folder = root.path / commit.folder
        if commit.update != update or not folder.is_dir():
            continue
        if problems := _problems(root, commit):
            raise PartialWrite(f"{commit.folder}: {'; '.join(problems)}", path=str(folder))
        segments, gap = _segments(root, records, commit)
        return Restorable(
            commit=commit,
            folder=folder,
            initial=_initial(folder),
            segments=segments,
            history_gap=gap,
            damaged=(),
        )
    return None


def check_restored(restored: Mapping[str, object], commit: CommitRecord) -> None:
    """Compare what the trainer says it restored with the commit and its ledger.

    Args:
        restored: the trainer's answer; ``update`` and ``consumed_digest`` are looked at.
        commit: what it was told to restore.

    Raises:
        ContractViolation: if update or digest of the consumed groups differ.
    """
    update, digest = restored.get("update"), restored.get("consumed_digest")
    if update != commit.update:
        raise ContractViolation(
            f"the trainer restored update {update} from the commit of update {commit.update}",
            folder=commit.folder,
        )
    if digest != commit.consumed_digest:
        raise ContractViolation(
            f"trainer and ledger disagree about what was consumed up to update {update}: "
            f"{digest} and {commit.consumed_digest}",
            folder=commit.folder,
        )


def _problems(root: RunRoot, commit: CommitRecord) -> list[str]:
    if commit.format_version > FORMAT_VERSION:
        return [f"format {commit.format_version}; this Milepost reads up to {FORMAT_VERSION}"]
    if problems := damage(root, commit):
        return problems
    try:
        segment = _segment(root, commit)
    except PartialWrite as exc:
        return [exc.message]
    if segment.digest != commit.consumed_digest:
        return ["its ledger and its record disagree about what was consumed"]
    return []


def _segment(root: RunRoot, commit: CommitRecord) -> LedgerSegment:
    name = segment_name(commit.update, commit.epoch)
    try:
        segment = LedgerSegment.from_bytes(locate(root, commit, name).read_bytes())
    except OSError as exc:
        raise PartialWrite(f"{name}: {exc.strerror}", path=name) from exc
    if segment.checksum() != commit.ledger_checksum:
        raise PartialWrite(f"{name} is not the ledger that {commit.folder} names", path=name)
    return segment


def _segments(
    root: RunRoot, records: Sequence[Record], commit: CommitRecord
) -> tuple[tuple[LedgerSegment, ...], str | None]:
    """Follow the parents of a valid commit; stops at the first segment that cannot be read."""
    segments = [_segment(root, commit)]
    while commit.parent_seq is not None:
        parent = records[commit.parent_seq]
        if not isinstance(parent, CommitRecord):
            raise ContractViolation(f"record {parent.seq} is no commit, {commit.folder} extends it")
        try:
            segments.append(_segment(root, parent))
        except PartialWrite as exc:
            return tuple(reversed(segments)), exc.message
        commit = parent
    return tuple(reversed(segments)), None


def _initial(folder: Path) -> Mapping[str, object] | None:
    path = folder / INITIAL
    return json.loads(path.read_bytes()) if path.exists() else None
