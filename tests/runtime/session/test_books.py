"""Rollout files are there before the commit that makes them the only copy."""

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runtime.errors import DiskFull
from runtime.rundir.layout import RunRoot
from runtime.session import books as module
from runtime.session.books import Books

pytestmark = pytest.mark.anyio


async def test_whoever_waits_for_what_is_kept_waits_for_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Semaphore(0)
    tries: Counter[int] = Counter()
    monkeypatch.setattr(module, "_AGAIN_S", (0.0, 0.0))

    def write(path: Path, collection: Any) -> None:
        tries[collection.id] += 1
        if tries[collection.id] == 1:
            assert may_write.acquire(timeout=30)
        if collection.id == 2 or (collection.id == 3 and tries[3] == 1):
            raise DiskFull("no space")
        path.write_bytes(b"rows")

    monkeypatch.setattr(module, "write_collection", write)
    root = RunRoot.of(tmp_path)
    context: Any = SimpleNamespace(root=root, epoch=1)
    nobody: Any = None
    async with anyio.create_task_group() as tasks:
        books = Books(context=context, recorder=nobody, view=nobody, tasks=tasks)
        await books.kept()
        for number in (1, 2, 3):
            collection: Any = SimpleNamespace(id=number)
            books.keep(collection)
        is_kept = anyio.Event()

        async def wait() -> None:
            await books.kept()
            is_kept.set()

        tasks.start_soon(wait)
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            assert not is_kept.is_set()
            may_write.release()
        await is_kept.wait()
    # The one that cannot be written holds nothing up; the one that could not be, once, is there.
    assert tries == {1: 1, 2: 3, 3: 2}
    assert [p.name for p in sorted(root.rollouts.iterdir())] == [
        "000001-e1.parquet", "000003-e1.parquet",
    ]  # fmt: skip
