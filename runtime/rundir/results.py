"""What an attempt leaves in its scheduler's results folder, for whoever cannot see the output root.

Copies, each with a cap: run file, logs, reports, the view. Weights and rollouts stay in the root.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from runtime.rundir.layout import AttemptDir

MOST_BYTES = 16 * 2**20
"""Of one file. Of longer logs the end is kept, other files are left out by name."""
LEFT_OUT = "left-out.txt"
_GROWING = (".log", ".jsonl")


def keep(attempt: AttemptDir, folder: Path, *, most_bytes: int = MOST_BYTES) -> list[str]:
    """Copy the attempt's story into the folder. Idempotent; what cannot be copied is named there.

    Args:
        attempt: that has ended.
        folder: of the scheduler, which made it; nothing is done where it is not there.
        most_bytes: of one file.

    Returns:
        Names in the folder, sorted.
    """
    if not folder.is_dir():
        return []
    kept: list[str] = []
    left: list[str] = []
    for name, source in sorted(_story(attempt)):
        try:
            if _copy(source, folder / name, most_bytes):
                kept.append(name)
            else:
                left.append(f"{source}: larger than {most_bytes} bytes")
        except OSError as error:
            left.append(f"{source}: {error.strerror}")
    if left:
        try:
            (folder / LEFT_OUT).write_text("".join(f"{line}\n" for line in left), encoding="utf-8")
            kept.append(LEFT_OUT)
        except OSError:
            pass  # the folder is full or gone, and there is nobody left to tell
    return sorted(kept)


def _story(attempt: AttemptDir) -> Iterator[tuple[str, Path]]:
    root = attempt.root
    named = {
        "run.log": attempt.session_log,
        "submitted-run.json": attempt.run,
        "plan.json": attempt.plan,
        "workflow.json": root.workflow,
        "journal.jsonl": root.journal,
        "rollout_errors.jsonl": root.rollout_errors,
    }
    yield from ((name, path) for name, path in named.items() if path.is_file())
    for path in attempt.path.glob("*"):
        if path.suffix in _GROWING and path != attempt.session_log and path.is_file():
            yield f"logs/{path.name}", path
    for path in root.reports.rglob("*"):
        if path.is_file():
            yield f"reports/{path.relative_to(root.reports)}", path


def _copy(source: Path, to: Path, most_bytes: int) -> bool:
    """Copy a file, or the last whole lines of a log; False where it is too large and no log."""
    to.parent.mkdir(parents=True, exist_ok=True)
    excess = source.stat().st_size - most_bytes
    if excess > 0 and source.suffix not in _GROWING:
        return False
    with source.open("rb") as read, to.open("wb") as write:
        if excess > 0:
            read.seek(excess - 1, os.SEEK_SET)
            read.readline()  # the rest of a line, or its end
        shutil.copyfileobj(read, write)
    return True
