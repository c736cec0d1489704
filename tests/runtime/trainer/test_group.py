"""The same promises of every TrainerHandle, and what only processes can break."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import psutil
import pytest
from safetensors.torch import load_file

from runtime.errors import ContractViolation, FencedError, PublicationFailed, TrainerLost
from runtime.trainer import group as group_module
from runtime.trainer.actor import Placement
from runtime.trainer.group import TrainerGroup
from runtime.trainer.handle import TrainerHandle
from runtime.trainer.local import LocalGroup
from runtime.trainer.operations import Operation
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.rank import RankServer
from runtime.trainer.settings import OptimizerSettings, TrainerSettings

MakeBatch = Callable[..., TrainBatch]
SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-3), distributed_timeout_s=30)


@asynccontextmanager
async def open_trainer(kind: str) -> AsyncIterator[TrainerHandle]:
    handle: TrainerHandle
    if kind == "local":
        handle = LocalGroup(SETTINGS)
    else:
        handle = await TrainerGroup.start(SETTINGS, Placement(ranks=int(kind[-1])), epoch=4)
    try:
        yield handle
    finally:
        await handle.shutdown()


async def whole_life(handle: TrainerHandle, model: Path, make: MakeBatch, scratch: Path) -> float:
    """Load, train, stage, train on while writing, restore; the loss of the repeated update."""
    facts = await handle.load(str(model))
    assert facts["vocab_size"] == 61
    first = await handle.train_step(make(1))
    assert first.values["total_grad_norm"] > 0
    staged = await handle.stage()
    commit = scratch / "commit"
    commit.mkdir()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(handle.write_staged, staged, str(commit))
        second = await handle.train_step(make(2))
    assert len(list(commit.iterdir())) == 2 * len(staged)
    written = await handle.write_snapshot(str(scratch / "snapshot"))
    specs = await handle.weight_specs()
    assert written.num_tensors == len(specs)
    stored = load_file(scratch / "snapshot" / "model.safetensors")
    assert {spec.name for spec in specs} == set(stored)
    restored = await handle.restore(str(commit))
    assert restored == {"update": 1, "consumed_digest": "digest-1"}
    again = await handle.train_step(make(2))
    assert again.values["loss"] == second.values["loss"]
    scores = await handle.score(make(3).sequences, temperature=1.0)
    assert [len(s) for s in scores] == [len(s.logprobs) for s in make(3).sequences]
    with pytest.raises(ContractViolation, match="stands at update 2"):
        await handle.train_step(make(9))
    return again.values["loss"]


def test_a_life_in_this_process(model_folder: Path, make_batch: MakeBatch, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_trainer("local") as handle:
            await whole_life(handle, model_folder, make_batch, tmp_path)

    anyio.run(main)


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ray_head")
def test_a_life_in_actors_equals_one_in_this_process_and_ends_with_a_rank(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    async def main() -> None:
        (tmp_path / "local").mkdir()
        (tmp_path / "actors").mkdir()
        async with open_trainer("local") as handle:
            want = await whole_life(handle, model_folder, make_batch, tmp_path / "local")
        async with open_trainer("ray-2") as handle:
            assert isinstance(handle, TrainerGroup)
            got = await whole_life(handle, model_folder, make_batch, tmp_path / "actors")
            assert got == pytest.approx(want, rel=1e-5)
            await lose_a_rank(handle, make_batch)

    anyio.run(main)


async def lose_a_rank(group: TrainerGroup, make: MakeBatch) -> None:
    survivor, victim = (psutil.Process(info.pid) for info in group.ranks)
    noticed: list[TrainerLost] = []

    async def watch() -> None:
        try:
            await group.watch()
        except TrainerLost as error:
            noticed.append(error)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.lowlevel.checkpoint()
            victim.kill()
        with pytest.raises(TrainerLost) as caught:
            await group.train_step(make(3))
        await anyio.to_thread.run_sync(partial(psutil.wait_procs, [survivor], timeout=30))
    assert not survivor.is_running()
    for error in (*noticed, caught.value):
        assert error.detail["rank"] == 1
        assert error.detail["last_update"] == 2
        assert f"rank 1 on {group.ranks[1].host}" in str(error)
    assert len(noticed) == 1


async def answers() -> None:
    pass


async def refuses() -> None:
    raise PublicationFailed("a peer left the broadcast")


@pytest.mark.parametrize(("sibling", "is_lost"), [(answers, False), (anyio.sleep_forever, True)])
def test_only_siblings_that_may_hang_are_ended_with_a_failed_call(
    sibling: Callable[[], Any], is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_BLAME_S", 0.05)

    async def main() -> None:
        group = TrainerGroup([], [], Placement(ranks=2), 4)
        with anyio.fail_after(10):
            with pytest.raises(PublicationFailed):
                await group._all([refuses(), sibling()], "send_bucket")
        assert (group._lost is not None) == is_lost

    anyio.run(main)


def server() -> RankServer:
    return RankServer(SETTINGS, rank=0, size=1, epoch=4)


def operation(serial: int, name: str = "train_step", epoch: int = 4) -> Operation:
    return Operation(epoch=epoch, update=serial, name=name, serial=serial)


def test_what_a_publication_kept_is_gone_before_a_step(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    """A step needs the memory, and makes it old."""
    one = server()
    one._sender._keep_bytes = 2**30
    one.step(operation(1, "load"), "load", str(model_folder))
    one.step(operation(2, "describe"), "describe")
    assert one._sender._kept
    kept: list[object] = []
    train_step = one.backend.train_step

    def step(batch: Any) -> Any:
        kept.append(one._sender._kept)
        return train_step(batch)

    one.backend.train_step = step
    one.step(operation(3), "train_step", make_batch(1))
    assert kept == [None]


def test_a_repeated_call_is_answered_from_memory(model_folder: Path, make_batch: MakeBatch) -> None:
    one = server()
    one.step(operation(1, "load"), "load", str(model_folder))
    first = one.step(operation(2), "train_step", make_batch(1))
    again = one.step(operation(2), "train_step", make_batch(1))
    assert again is first
    assert one.backend.update == 1
    # Without the memory it would be refused: the trainer stands at update 1 by now.
    with pytest.raises(ContractViolation):
        one.step(operation(3), "train_step", make_batch(1))


def test_a_repeated_failure_fails_again_without_a_new_try(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = server()
    one.step(operation(1, "load"), "load", str(model_folder))
    with pytest.raises(ContractViolation) as first:
        one.step(operation(2), "train_step", make_batch(5))
    with pytest.raises(ContractViolation) as second:
        one.step(operation(2), "train_step", make_batch(1))  # would succeed if it were tried
    assert second.value is first.value


def test_calls_of_the_past_and_of_other_epochs_are_refused(
    model_folder: Path, make_batch: MakeBatch
) -> None:
    one = server()
    one.step(operation(5, "load"), "load", str(model_folder))
    with pytest.raises(FencedError, match="came after"):
        one.step(operation(4), "train_step", make_batch(1))
    with pytest.raises(FencedError, match="epoch 3"):
        one.step(operation(6, epoch=3), "train_step", make_batch(1))
    assert one.backend.update == 0


def test_on_start_runs_before_anything_else() -> None:
    called: list[int] = []
    RankServer(SETTINGS, rank=0, size=1, epoch=1, on_start=partial(called.append, 1))
    assert called == [1]
