"""What a session owes an object store from its first moment: the copy of what it restored."""

import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import boto3
import pytest
from moto import mock_aws

from runtime.checkpoints.bucket import Bucket, StoreUnreachable
from runtime.checkpoints.copied import read_copied, write_copied
from runtime.checkpoints.download import restore_copy
from runtime.checkpoints.resume import find_restorable
from runtime.checkpoints.upload import copy_commit
from runtime.checkpoints.uploads import Uploads
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.journal import read_rows
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord
from runtime.session.committing import make_uploads
from runtime.session.context import Context
from runtime.session.ground import Ground
from runtime.session.restoring import Standing
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from runtime.telemetry.recorder import Recorder
from tests.runtime.checkpoints.tiny_run import IDENTITY, new_root, take_over, trained
from tests.runtime.session.attempted import context_of

STORE = "s3://copies/run"
pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket="copies")
        yield


@pytest.fixture
def context(tmp_path: Path) -> Context:
    # A slash too many: receipts and store have one name for it.
    return context_of(tmp_path / "made", f'checkpoint.upload="{STORE}/"')


@asynccontextmanager
async def session(context: Context) -> AsyncIterator[tuple[CommitRecord | None, Uploads]]:
    """What stands when a session has restored, and its copies; nothing is trained."""
    order = PromptOrder(64, epochs=2)
    found = find_restorable(context.root, Chain(context.root).read())
    standing = Standing(
        identity=IDENTITY,
        stores={},
        order=order,
        ledger=Ledger(order) if found is None else Ledger.restore(found.segments, order),
        found=found,
        update=0 if found is None else found.commit.update,
    )
    recorder = Recorder(context.root.path, context.owner, clock=context.clock)
    async with anyio.create_task_group() as tasks:
        ground = Ground(
            context=context,
            scratch=context.root.path,
            recorder=recorder,
            view=SessionView.of(context),
            signals=Signals.of(
                context.root, epoch=1, detached=True, detach_grace_s=1.0, clock=context.clock
            ),
            tasks=tasks,
        )
        uploads = make_uploads(ground, standing)
        assert uploads is not None
        yield None if found is None else found.commit, uploads
    recorder.flush()


async def test_what_was_restored_is_copied_where_nothing_says_that_it_is(context: Context) -> None:
    """Its committer was killed over the copy, and no update is left to train."""
    await trained(context.root, 2)
    async with session(context) as (commit, uploads):
        assert commit is not None
        assert uploads.pinned == {commit.policy}
        assert await uploads.settle()
        assert uploads.copied == commit
    copied = read_copied(context.root)
    assert copied is not None
    assert (str(copied.policy), copied.detail["store"]) == (commit.policy, STORE)
    empty = context_of(context.root.path.parent / "elsewhere").root
    for record in empty.chain.iterdir():
        record.unlink()
    assert restore_copy(empty, Bucket.of(STORE)) == commit


async def test_a_copy_that_is_known_to_be_whole_is_not_begun(context: Context) -> None:
    await trained(context.root, 2)
    async with session(context) as (_, uploads):
        assert await uploads.settle()
    async with session(context) as (_, uploads):
        assert uploads.pinned == set()
        assert await uploads.settle()
        assert uploads.copied is None


async def test_a_receipt_that_was_lost_with_its_machine_is_written_again(context: Context) -> None:
    await trained(context.root, 2)
    found = find_restorable(context.root, Chain(context.root).read())
    assert found is not None
    copy_commit(context.root, Bucket.of(STORE), found.commit, keep=2)
    (context.root.receipts / "upload.json").unlink()
    async with session(context) as (commit, uploads):
        assert await uploads.settle()
    copied = read_copied(context.root)
    assert commit is not None
    assert copied is not None
    assert (str(copied.policy), copied.detail["num_bytes"]) == (commit.policy, 0)


async def test_a_receipt_of_another_store_proves_nothing_for_this_one(context: Context) -> None:
    await trained(context.root, 2)
    found = find_restorable(context.root, Chain(context.root).read())
    assert found is not None
    write_copied(context.root, found.commit, store="s3://old/run", num_bytes=1, time=0.0)
    async with session(context) as (commit, uploads):
        assert await uploads.settle()
        assert uploads.copied == commit
    copied = read_copied(context.root)
    assert copied is not None
    assert copied.detail["store"] == STORE


async def test_a_fresh_start_has_nothing_to_copy(context: Context) -> None:
    async with session(context) as (commit, uploads):
        assert (commit, uploads.pinned) == (None, set())


async def test_a_rewind_waits_for_the_store_and_what_it_undid_never_comes_back(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(context.root, 3)
    older, newest = history.standing_commits(Chain(context.root).read())[-2:]
    copy_commit(context.root, Bucket.of(STORE), newest, keep=1)
    for path in (context.root.path / newest.folder).iterdir():
        path.write_bytes(b"")
    take_over(context.root, restored=older)
    async with session(context) as (commit, uploads):
        assert commit == older
        with monkeypatch.context() as away:
            away.setattr(Bucket, "create", _away)
            for _ in range(2):
                with pytest.raises(StoreUnreachable):
                    await uploads.tell_rewinds()
        # What was undone is whole there still, and what was restored is not yet.
        assert restore_copy(empty_root(context), Bucket.of(STORE)) == newest
        await uploads.tell_rewinds()
        assert restore_copy(empty_root(context), Bucket.of(STORE)) == older
        with monkeypatch.context() as away:
            away.setattr(Bucket, "names", _away)
            await uploads.tell_rewinds()
    rows = read_rows(context.root.pipeline_lifecycle)
    assert [row["event"] for row in rows] == ["checkpoint.rewind_known"]


async def test_without_a_rewind_a_store_that_is_away_is_not_waited_for(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained(context.root, 2)
    calls: list[str] = []
    went_on = threading.Event()

    def away(_: Bucket, under: str) -> Iterator[str]:
        calls.append(under)
        if len(calls) == 2:
            went_on.set()
        raise StoreUnreachable("away")

    monkeypatch.setattr(Bucket, "names", away)
    async with session(context) as (_, uploads):
        await uploads.tell_rewinds()
        assert calls == []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uploads.run)
            # The epoch could not be told; the copy of what was restored is tried all the same.
            assert await anyio.to_thread.run_sync(went_on.wait, 60)
            tasks.cancel_scope.cancel()
        assert uploads.copied is None


def empty_root(context: Context) -> RunRoot:
    return new_root(Path(tempfile.mkdtemp(dir=context.root.path.parent)))


def _away(*_: object, **__: object) -> None:
    raise StoreUnreachable("away")
