from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from runtime.checkpoints.files import damage
from runtime.checkpoints.resume import find_restorable
from runtime.errors import DiskFull, FencedError, PartialWrite, StoreError, TrainerLost
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord
from tests.runtime.checkpoints.tiny_run import TinyRun, new_root, take_over


@pytest.fixture
def root(tmp_path):
    return new_root(tmp_path / "run")


@pytest.fixture
def probe(monkeypatch):
    """Set the fault point for one test."""

    def use(function):
        monkeypatch.setattr(atomic, "probe", function)

    return use


def commits(root) -> list[CommitRecord]:
    return [r for r in Chain(root).read() if isinstance(r, CommitRecord)]


async def started(root, tasks) -> TinyRun:
    run = TinyRun(root, take_over(root), tasks)
    await run.begin()
    return run


def test_commits_are_whole_and_extend_each_other(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            for _ in range(3):
                run.train()
                boundary = await run.boundary()
                assert (boundary.stall_s, boundary.num_bytes) == (0.001, 64)
                record = await run.committer.settle()
                assert record.update == run.state.update
        zero, *later = commits(root)
        assert zero.parent_seq is None
        assert [c.update for c in later] == [1, 2, 3]
        assert [c.folder for c in later][-1] == "checkpoints/000003-e1"
        assert [c.parent_seq for c in later] == [zero.seq, later[0].seq, later[1].seq]
        assert all(damage(root, c) == [] for c in (zero, *later))
        assert {f.name for f in later[0].files} == {"a.json", "b.bin", "ledger/000001-e1.seg"}
        assert later[-1].consumed_digest == run.ledger.digest
        found = find_restorable(root, Chain(root).read())
        assert [len(s.consumed) for s in found.segments] == [0, 2, 2, 2]
        assert found.segments[-1].cursor == 9

    anyio.run(main)


def test_training_goes_on_while_files_are_written_and_the_next_boundary_waits(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.state.may_write = anyio.Event()
            run.train()
            await run.boundary()  # returns although nothing can be written
            run.train()
            assert [c.update for c in commits(root)] == [0]
            second = anyio.Event()

            async def next_boundary():
                await run.boundary()
                second.set()

            tasks.start_soon(next_boundary)
            await anyio.wait_all_tasks_blocked()
            assert not second.is_set()
            assert run.committer.num_waits == 1
            run.state.may_write.set()
            await second.wait()
            await run.committer.settle()
        assert [c.update for c in commits(root)] == [0, 1, 2]
        # The first commit holds the state of its own boundary, not of when it was written.
        state = json.loads((root.checkpoint(1, 1) / "a.json").read_text())
        assert state["update"] == 1
        assert state["consumed_digest"] == commits(root)[1].consumed_digest

    anyio.run(main)


def test_a_policy_that_is_committed_is_not_written_again(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.train()
            for _ in range(2):
                await run.boundary()
                await run.committer.settle()
        assert [c.update for c in commits(root)] == [0, 1]
        assert damage(root, commits(root)[-1]) == []

    anyio.run(main)


def test_trouble_after_the_record_does_not_keep_a_commit_that_stands_from_counting(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = TinyRun(root, take_over(root), tasks)
            run.error = PartialWrite("a record of the chain could not be read")
            with pytest.raises(PartialWrite):
                await run.begin()
            await run.begin()
            run.train()
            await run.boundary()
            with pytest.raises(PartialWrite):
                await run.committer.settle()
            run.error = None
            await run.boundary()
            assert (await run.committer.settle()).update == 1
        assert [c.update for c in commits(root)] == [0, 1]

    anyio.run(main)


def test_full_disk_is_reported_and_made_good_by_the_next_boundary(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.state.error = OSError(errno.ENOSPC, "No space left on device")
            run.train()
            await run.boundary()
            with pytest.raises(DiskFull, match="no space"):
                await run.committer.settle()
            assert [p.name for p in root.checkpoints.iterdir()] == ["000000-e1"]
            run.state.error = None
            run.train()
            await run.boundary()
            await run.committer.settle()
            assert run.committer.failure is None
        found = find_restorable(root, Chain(root).read())
        assert found.commit.update == 2
        assert [len(s.consumed) for s in found.segments] == [0, 4]

    anyio.run(main)


def test_a_real_write_past_the_file_size_limit_leaves_no_folder(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.state.padding = 2 << 20
            run.train()
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            try:
                await run.boundary()
                with pytest.raises(DiskFull):
                    await run.committer.settle()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert [p.name for p in root.checkpoints.iterdir()] == ["000000-e1"]
            await run.boundary()
            assert (await run.committer.settle()).update == 1

    anyio.run(main)


def test_no_space_at_any_file_operation_loses_no_commit_and_invents_none(tmp_path, probe):
    """Each operation of a commit fails once; the chain and ``failure`` always agree."""

    async def main(number: int) -> bool:
        root = new_root(tmp_path / str(number))
        seen = 0

        def full(operation: str, path: Path) -> None:
            nonlocal seen
            seen += 1
            if seen == number and operation not in ("unlink", "rmdir"):
                raise OSError(errno.ENOSPC, "No space left on device")

        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.train()
            probe(full)
            await run.boundary()
            try:
                await run.committer.settle()
            except StoreError:
                assert commits(root)[-1].update == 0
            else:
                assert commits(root)[-1].update == 1
            fired = seen >= number
            probe(None)
            run.train()
            await run.boundary()
            await run.committer.settle()
        found = find_restorable(root, Chain(root).read())
        assert found.commit.update == 2
        assert found.damaged == ()
        assert sum(len(s.consumed) for s in found.segments) == 4
        return fired

    number = 1
    while anyio.run(main, number):
        number += 1
    assert number > 10


def test_every_file_is_durable_before_the_record_that_names_it(root, probe):
    async def main():
        log: list[tuple[str, str]] = []
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.train()
            probe(lambda operation, path: log.append((operation, path.name)))
            await run.boundary()
            await run.committer.settle()
        record = log.index(("link", "2.json"))
        for needed in (
            ("fsync", "a.json"), ("fsync", "b.bin"), ("fsync", "000001-e1.seg"),
            ("fsync_folder", ".000001-e1.writing"), ("fsync_folder", "checkpoints"),
            ("fsync_folder", "ledger"), ("fsync_folder", root.path.name),
        ):  # fmt: skip
            assert log.index(needed) < record, needed
        assert log.index(("rename", ".000001-e1.writing")) < log.index(
            ("fsync_folder", "checkpoints")
        )

    anyio.run(main)


def test_record_waits_for_the_evidence_of_the_updates_before_it(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            is_kept = anyio.Event()
            run.committer._before_record = is_kept.wait
            run.train()
            await run.boundary()
            await anyio.sleep(0.05)
            assert [c.update for c in commits(root)] == [0]
            is_kept.set()
            await run.committer.settle()
        assert [c.update for c in commits(root)] == [0, 1]

    anyio.run(main)


def test_a_fenced_writer_cannot_commit(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.train()
            run.state.may_write = anyio.Event()
            await run.boundary()
            take_over(root, commits(root)[-1])
            run.state.may_write.set()

    with pytest.RaisesGroup(FencedError):
        anyio.run(main)
    assert [c.update for c in commits(root)] == [0]
    assert [p.name for p in root.checkpoints.iterdir()] == ["000000-e1"]


def test_a_lost_trainer_ends_the_session_and_leaves_no_folder(root):
    async def main():
        async with anyio.create_task_group() as tasks:
            run = await started(root, tasks)
            run.state.error = TrainerLost("rank 0 is gone")
            run.train()
            await run.boundary()

    with pytest.RaisesGroup(TrainerLost):
        anyio.run(main)
    assert [p.name for p in root.checkpoints.iterdir()] == ["000000-e1"]


@pytest.fixture
def quick_folder(tmp_path):
    """In memory where that exists: a kill leaves the same files there, and syncs cost nothing."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield folder


def test_kill_at_every_file_operation_leaves_the_newest_told_commit_restorable(quick_folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.checkpoints.commit_victim", quick_folder],
        check=True,
        capture_output=True,
        timeout=50,
    )
    rows = json.loads(done.stdout.splitlines()[-1])  # logs come first
    assert len(rows) > 40
    assert [r["killed"] for r in rows] == [True] * (len(rows) - 1) + [False]
    for row in rows:
        told = max(row["told"], default=None)
        # What was reported as committed is there, or the next one, whose report came too late.
        assert row["update"] in ({None, 0} if told is None else {told, told + 1}), row
        assert row["damaged"] == 0
        assert row["gap"] is None
        assert row["segments"] == (0 if row["update"] is None else row["update"] + 1)
    assert rows[-1]["update"] == 1
