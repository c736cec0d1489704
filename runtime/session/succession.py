"""What a new epoch takes over from the one before: which commit, and why it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.rundir import history
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which commit a new epoch restores."""

    commit: CommitRecord | None
    """None: history has no commit, the run starts fresh."""
    passed_over: tuple[str, ...] = ()
    """Newer commits that are damaged, with what is wrong; their files stay where they are."""


Choose = Callable[[RunRoot, Sequence[Record]], Choice]


def newest_valid(root: RunRoot, records: Sequence[Record]) -> Choice:
    """The newest commit whose files are all as its record says; reads them.

    Raises:
        StoreError: if there are commits and none is valid.
    """
    if history.newest_commit(records) is None:
        return Choice(commit=None)
    # Loads numpy: not for a guard that has nothing to restore.
    from runtime.checkpoints.resume import find_restorable

    found = find_restorable(root, records)
    if found is None:
        return Choice(commit=None)
    return Choice(commit=found.commit, passed_over=tuple(map(str, found.damaged)))


def reason(asked: str, records: Sequence[Record], choice: Choice) -> str:
    """Why an epoch begins, for its record.

    Args:
        asked: what the launcher says.
        records: the chain before it.
        choice: what it restores.
    """
    before, end = history.newest_epoch(records), history.current_end(records)
    if before is None:
        return asked
    how = f"ended by {end.ended_by}" if end else "vanished without an end record"
    return "; ".join((f"{asked}: epoch {before.epoch} {how}", *choice.passed_over))
