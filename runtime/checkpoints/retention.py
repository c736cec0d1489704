"""Which commits' folders are kept. Ledger segments always are: history is made of them.

Deletion renames first: a folder under its final name is whole, whenever the process ends.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import structlog

from runtime.checkpoints.files import remove_folder
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.history import standing_commits
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord

_DELETED = ".deleted"
_log: structlog.stdlib.BoundLogger = structlog.get_logger("checkpoints")


def retain(
    root: RunRoot, epoch: int, *, keep: int, pinned: Collection[str] = ()
) -> tuple[str, ...]:
    """Delete commit folders that nobody needs any more. Idempotent; called between commits.

    Kept: the newest ``keep`` commits of history, the pinned, commit 0 (a reference to the initial
    model), and commits that a rewind passed over, since those are evidence of damage. Also deleted:
    what writers left unfinished. May be called after a kill at any point of an earlier call.

    Args:
        root: the output root.
        epoch: of the caller, who must own the run.
        keep: at least 1.
        pinned: policy ids (``e3.u50``) that evaluations still need.

    Returns:
        Names of the commit folders deleted now, oldest first. What could not be deleted (a file
        that somebody reads over a network, a folder without permission) is logged and left to the
        next call: no run ends for it.

    Raises:
        FencedError: if a newer owner exists; nothing was deleted.
        ValueError: if ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: the newest commit is never deleted")
    if not root.checkpoints.is_dir():
        return ()
    records = Chain(root).check(epoch)
    standing = standing_commits(records)
    doomed = {
        c.folder for c in standing[:-keep] if c.policy not in pinned and c.parent_seq is not None
    }
    known = {r.folder for r in records if isinstance(r, CommitRecord)}
    deleted: list[str] = []
    for folder in sorted(p for p in root.checkpoints.iterdir() if p.is_dir()):
        name = str(folder.relative_to(root.path))
        try:
            if folder.name.startswith("."):
                remove_folder(folder)
            elif name in doomed or name not in known:
                trash = folder.with_name(f".{folder.name}{_DELETED}")
                remove_folder(trash)
                atomic.point("rename", folder)
                folder.rename(trash)
                deleted.append(name)
                remove_folder(trash)
        except OSError as exc:
            _log.warning("checkpoint.leftover", path=str(folder), error=str(exc))
    with suppress(OSError):
        atomic.fsync_folder(root.checkpoints)
    return tuple(deleted)
