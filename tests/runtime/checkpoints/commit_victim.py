"""Commits that are killed at each of their file operations; prints what the chain says after each.

Run as ``python -m tests.runtime.checkpoints.commit_victim FOLDER``. One process forks a victim per
operation, since starting an interpreter for each would take most of the time. The killed process is
this program's own child.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio

from runtime.checkpoints.resume import find_restorable
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from tests.runtime.checkpoints.tiny_run import TinyRun, new_root, take_over


async def life(folder: Path, told: int) -> None:
    """Commit 0 and one more; writes down each commit that returned."""
    root = new_root(folder)
    epoch = take_over(root)
    async with anyio.create_task_group() as tasks:
        run = TinyRun(root, epoch, tasks)
        await run.begin()
        os.write(told, b"0 ")
        run.train()
        await run.boundary()
        await run.committer.settle()
        os.write(told, b"1 ")


def kill_at(number: int) -> None:
    """Lose power at the given file operation, counted from 0: what is not synced is half there."""
    seen = 0

    def probe(operation: str, path: Path) -> None:
        nonlocal seen
        if seen == number:
            if operation == "fsync" and path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    atomic.probe = probe


def one(folder: Path, number: int) -> dict[str, object]:
    """Let a victim die at one operation and look at what it left."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        kill_at(number)
        anyio.run(life, folder, writing)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = [int(word) for word in pipe.read().split()]
    _, status = os.waitpid(pid, 0)
    root = new_root(folder)
    found = find_restorable(root, Chain(root).read())
    return {
        "killed": os.WIFSIGNALED(status),
        "told": told,
        "update": None if found is None else found.commit.update,
        "damaged": 0 if found is None else len(found.damaged),
        "segments": 0 if found is None else len(found.segments),
        "gap": None if found is None else found.history_gap,
    }


def main() -> None:
    """Kill at operation 0, 1, 2, ... until a victim survives."""
    base = Path(sys.argv[1])
    rows: list[dict[str, object]] = []
    while not rows or rows[-1]["killed"]:
        rows.append(one(base / str(len(rows)), len(rows)))
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
