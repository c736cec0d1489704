"""A session's compiler caches: what it leaves behind, and that none of it can end a run."""

import json
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from runtime.rundir.receipts import read_receipt
from runtime.session.caching import SessionCaches
from runtime.session.scratch import CACHES_VARIABLE
from runtime.session.steps import Step
from runtime.telemetry.recorder import Recorder
from tests.runtime.session.attempted import context_of

pytestmark = pytest.mark.anyio


class Node:
    """One session on one node: its recorder, and its caches where its run file keeps any."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self.context = context_of(folder, *sets)
        (folder / "config.json").write_text("{}")
        self.model = folder
        self.recorder = Recorder(
            self.context.root.path, self.context.owner, clock=self.context.clock
        )
        self.folder = folder / "local"
        found = SessionCaches.of(self.context, self.recorder, self.folder)
        assert found is not None
        self.caches = found

    def compile(self, content: bytes) -> None:
        kernel = Path(self.caches.environment["TORCHINDUCTOR_CACHE_DIR"]) / "kernel"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(content)

    def outcome(self) -> str | None:
        receipt = read_receipt(self.context.root, str(Step.parse("cache")))
        assert receipt is not None
        return receipt.detail.get("inductor", {}).get("outcome")

    def rows(self) -> dict[str, bool]:
        self.recorder.flush()
        lines = self.context.root.driver_timing.read_text().splitlines()
        return {row["name"]: row["cold"] for row in map(json.loads, lines)}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def is_there(told: Path) -> bool:
    """The process that wrote its id there."""
    return Path(f"/proc/{told.read_text().strip()}").exists()


def kept(folder: Path) -> str:
    return f"output.compiler_cache={json.dumps(str(folder))}"


def test_every_process_is_told_of_the_folder_around_its_caches(tmp_path: Path) -> None:
    node = Node(tmp_path, kept(tmp_path / "store"))
    assert node.caches.environment[CACHES_VARIABLE] == str(node.folder)


async def test_the_second_session_starts_warm_and_publishes_nothing(tmp_path: Path) -> None:
    store = kept(tmp_path / "store")
    first = Node(tmp_path / "first", store)
    await first.caches.restore(first.model)
    assert first.rows()["cache_restore"] is True
    first.compile(b"code")
    await first.caches.publish(lambda: False)
    assert first.outcome() == "published"
    assert set(first.rows()) >= {"cache_restore", "cache_pack", "cache_publish", "cache_report"}
    assert not first.folder.exists()

    second = Node(tmp_path / "second", store)
    await second.caches.restore(second.model)
    assert second.rows()["cache_restore"] is False
    assert (second.folder / "inductor" / "kernel").read_bytes() == b"code"
    await second.caches.publish(lambda: False)
    assert second.outcome() == "present"


async def test_a_store_that_cannot_be_written_costs_the_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    node = Node(tmp_path / "run", kept(tmp_path / "store"))
    await node.caches.restore(node.model)
    node.compile(b"code")
    await node.caches.publish(lambda: False)
    assert node.outcome() == "failed"


async def test_a_session_that_is_terminated_begins_no_publishing(tmp_path: Path) -> None:
    node = Node(tmp_path / "run", kept(tmp_path / "store"))
    await node.caches.restore(node.model)
    node.compile(b"code")
    await node.caches.publish(lambda: True)
    assert node.outcome() == "cancelled"
    assert not (tmp_path / "store").exists()


async def test_a_session_that_is_cancelled_leaves_no_interpreter_behind(tmp_path: Path) -> None:
    told, python = tmp_path / "pid", tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {told}.new; mv {told}.new {told}; sleep 600\n")
    python.chmod(0o755)
    engine = ('rollout.engine="sglang"', f"rollout.engine_python={json.dumps(str(python))}")
    node = Node(tmp_path / "run", kept(tmp_path / "store"), *engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.caches.restore, node.model)
        await anyio.to_thread.run_sync(wait_for, told)
        tasks.cancel_scope.cancel()
    assert not is_there(told)


async def test_no_model_to_make_a_key_of_is_no_reason_to_fail(tmp_path: Path) -> None:
    node = Node(tmp_path / "run", "output.compiler_cache='s3://nowhere/at/all'")
    node.caches.context.root.receipts.rmdir()
    await node.caches.publish(lambda: False)  # it never opened
    assert read_receipt(node.context.root, "cache") is not None


def test_without_an_archive_there_is_nothing(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    recorder = Recorder(context.root.path, context.owner, clock=context.clock)
    assert SessionCaches.of(context, recorder, tmp_path / "local") is None
