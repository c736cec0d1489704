"""Exports of a real trainer: equal bit by bit, loaded by transformers, made from it or from a
commit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from runtime.checkpoints.commit import Committer
from runtime.checkpoints.export import (
    RECEIPT,
    export_commit,
    export_damage,
    export_live,
    read_receipt,
)
from runtime.checkpoints.files import digest
from runtime.checkpoints.readback import checksums_of, stored_tensors
from runtime.checkpoints.resume import check_restored, find_restorable, restorable_at
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import ContractViolation, DiskFull, PartialWrite
from runtime.policy import PolicyId
from runtime.publication.checksum import checksums
from runtime.publication.snapshot import write_snapshot
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.trainer.local import LocalGroup
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import OptimizerSettings, TrainerSettings
from tests.contracts.tiny_models import save_model, tiny_qwen3
from tests.runtime.checkpoints.tiny_run import IDENTITY, new_root, take_over

SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), max_mean_logprob_gap=1e9)
P1, P2 = PolicyId(1, 1), PolicyId(1, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model"))


@pytest.fixture
def root(tmp_path):
    return new_root(tmp_path / "run")


def batch(update: int, digest: str) -> TrainBatch:
    sequences = tuple(
        Sequence(
            tokens=np.array([1, 2, 3 + i, 4], np.int32),
            prompt_len=2,
            logprobs=np.array([-5.0, -5.0], np.float32),
            mask=np.ones(2, np.float32),
            advantage=1.0 - 2 * (i % 2),
            span_ends=np.array([2], np.int32),
            span_updates=np.array([-1], np.int32),
            prefill_update=-1,
            group=0,
            is_equal=False,
        )
        for i in range(2)
    )
    return TrainBatch(update=update, sequences=sequences, consumed_digest=digest)


def weights(trainer: LocalGroup) -> dict[str, torch.Tensor]:
    exported = trainer.backend.export_weights(1 << 30)
    return {name: tensor.clone() for bucket in exported for name, tensor in bucket}


async def committed_run(root, model: Path) -> tuple[LocalGroup, dict[str, torch.Tensor]]:
    """A commit of update 1 by a trainer that stands at update 2 now; the weights of update 1."""
    epoch = take_over(root)
    trainer = LocalGroup(SETTINGS)
    await trainer.load(str(model))
    ledger = Ledger(PromptOrder(8))

    async def on_committed(record, segment) -> None:
        ledger.committed(segment)

    async with anyio.create_task_group() as tasks:
        committer = Committer(
            root=root, epoch=epoch, identity=IDENTITY, source=trainer, tasks=tasks,
            on_committed=on_committed, parent=None,
        )  # fmt: skip
        await committer.commit_initial(ledger.snapshot(), PolicyId(epoch, 0), {"path": str(model)})
        for update in (1, 2):
            admitted = ledger.admit()
            key = (admitted.prompt_id, admitted.attempt)
            ledger.finish(*key)
            consumed = ledger.digest_after([admitted.prompt_id], update)
            await trainer.train_step(batch(update, consumed))
            ledger.consume([key], update)
            if update == 1:
                await committer.boundary(PolicyId(epoch, update), ledger.snapshot)
                at_commit = weights(trainer)
        await committer.settle()
    return trainer, at_commit


def test_the_final_export_is_the_trainer_and_loads_in_transformers(root, model):
    async def main():
        trainer, _ = await committed_run(root, model)
        receipt = await export_live(root, trainer, P2, model=model, epoch=1, final=True)
        held = weights(trainer)
        assert receipt.checksums == checksums(held.items())
        assert receipt.source == "trainer"
        loaded = AutoModelForCausalLM.from_pretrained(root.export)
        for name, tensor in held.items():
            assert torch.equal(loaded.get_parameter(name), tensor), name
        tokens = PreTrainedTokenizerFast.from_pretrained(root.export)
        assert len(tokens) == 261
        assert read_receipt(root.export) == receipt
        for entry in receipt.files:
            assert digest(root.export / entry.name) == entry.sha256
        names = {p.name for p in root.export.iterdir()}
        assert names == {f.name for f in receipt.files} | {RECEIPT}
        assert [p.name for p in root.path.iterdir() if p.name.startswith(".")] == []
        await trainer.shutdown()

    anyio.run(main)


@pytest.mark.parametrize("data", [b"", b'{"policy": "e1.u2"}', b"\xff"])
def test_a_receipt_that_cannot_be_read_proves_no_export(tmp_path, data):
    (tmp_path / RECEIPT).write_bytes(data)
    assert read_receipt(tmp_path) is None


def test_a_sharded_export_is_whole_and_loads(root, model, monkeypatch):
    shards = partial(write_snapshot, shard_bytes=1 << 14)
    monkeypatch.setattr("runtime.trainer.rank.write_snapshot", shards)

    async def main():
        trainer, at_commit = await committed_run(root, model)
        await trainer.shutdown()
        restorable = restorable_at(root, Chain(root).read(), 1)
        assert restorable_at(root, Chain(root).read(), 7) is None
        other = LocalGroup(SETTINGS)
        folder = root.path / "elsewhere"
        receipt = await export_commit(root, other, restorable, model=model, epoch=1, to=folder)
        await other.shutdown()
        return at_commit, folder, receipt

    at_commit, folder, receipt = anyio.run(main)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert export_damage(folder, receipt) == []
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, weight in at_commit.items():
        assert torch.equal(loaded[name], weight)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    assert [last.name in problem for problem in export_damage(folder, receipt)] == [True]


def test_an_export_of_a_commit_is_the_weights_of_that_update(root, model):
    async def main():
        trainer, at_commit = await committed_run(root, model)
        now = weights(trainer)
        await trainer.shutdown()
        restorable = find_restorable(root, Chain(root).read())
        assert restorable.commit.update == 1
        other = LocalGroup(SETTINGS)
        receipt = await export_commit(root, other, restorable, model=model, epoch=1)
        assert (receipt.policy, receipt.source) == ("e1.u1", "commit")
        assert receipt.checksums == checksums(at_commit.items())
        assert receipt.checksums != checksums(now.items())
        assert checksums_of(stored_tensors(root.path / "export-1")) == receipt.checksums
        # What the trainer says it restored is what the commit's ledger says.
        check_restored(await other.restore(str(restorable.folder)), restorable.commit)
        await other.shutdown()

    anyio.run(main)


def test_an_older_export_of_the_same_name_is_replaced(root, model):
    async def main():
        trainer, _ = await committed_run(root, model)
        root.export.mkdir()
        (root.export / "leftover").write_text("old")
        receipt = await export_live(root, trainer, P2, model=model, epoch=1, final=True)
        assert not (root.export / "leftover").exists()
        assert read_receipt(root.export) == receipt
        await trainer.shutdown()

    anyio.run(main)


def test_the_config_tells_the_dtype_that_the_weights_have(root, model, tmp_path):
    async def main():
        other = tmp_path / "bf16"
        save_model(tiny_qwen3(0).bfloat16(), other)
        assert json.loads((other / "config.json").read_text())["dtype"] == "bfloat16"
        trainer, _ = await committed_run(root, model)
        await export_live(root, trainer, P2, model=other, epoch=1, final=True)
        assert json.loads((root.export / "config.json").read_text())["dtype"] == "float32"
        held = weights(trainer)
        loaded = AutoModelForCausalLM.from_pretrained(root.export)
        assert all(torch.equal(loaded.get_parameter(n), t) for n, t in held.items())
        await trainer.shutdown()

    anyio.run(main)


class Broken:
    """A trainer whose export goes wrong in a chosen way."""

    def __init__(self, trainer: LocalGroup, how: str) -> None:
        self.trainer = trainer
        self.how = how

    async def write_snapshot(self, folder: str):
        if self.how == "full":
            raise OSError(28, "No space left on device")
        written = await self.trainer.write_snapshot(folder)
        path = Path(folder, "model.safetensors")
        if self.how == "flipped":
            data = bytearray(path.read_bytes())  # noqa: ASYNC240 - a small file
            data[-1] ^= 1
            path.write_bytes(data)  # noqa: ASYNC240
        if self.how == "short":
            with path.open("r+b") as file:  # noqa: ASYNC230
                file.truncate(1000)
        return written


@pytest.mark.parametrize(
    ("how", "error"), [("full", DiskFull), ("flipped", PartialWrite), ("short", PartialWrite)]
)
def test_an_export_that_goes_wrong_leaves_the_older_one(root, model, how, error):
    async def main():
        trainer, _ = await committed_run(root, model)
        before = await export_live(root, trainer, P2, model=model, epoch=1, final=True)
        with pytest.raises(error):
            await export_live(root, Broken(trainer, how), P2, model=model, epoch=1, final=True)
        assert read_receipt(root.export) == before
        assert [p.name for p in root.path.iterdir() if p.name.startswith(".")] == []
        await trainer.shutdown()

    anyio.run(main)


class _Killed(BaseException):
    pass


def test_a_kill_at_any_operation_leaves_whole_exports_only(root, model, monkeypatch):
    """The newest is whole, or it is missing while an older one made way: never half of one."""

    async def main():
        trainer, _ = await committed_run(root, model)
        await export_live(root, trainer, P1, model=model, epoch=1, final=True)
        number = 0
        while True:
            number += 1
            left = number

            def probe(operation, path):
                nonlocal left
                left -= 1
                if left == 0:
                    raise _Killed

            monkeypatch.setattr(atomic, "probe", probe)
            try:
                await export_live(root, trainer, P2, model=model, epoch=1, final=True)
            except _Killed:
                pass
            finally:
                monkeypatch.setattr(atomic, "probe", None)
            if root.export.exists():
                receipt = read_receipt(root.export)
                assert checksums_of(stored_tensors(root.export)) == receipt.checksums
            if left > 0:
                break
        assert number > 12
        assert read_receipt(root.export).policy == "e1.u2"
        await trainer.shutdown()

    anyio.run(main)


def test_a_trainer_that_restores_something_else_is_not_exported(root, model):
    class Amnesiac(LocalGroup):
        async def restore(self, folder: str):
            return {"update": 0, "consumed_digest": ""}

    async def main():
        trainer, _ = await committed_run(root, model)
        await trainer.shutdown()
        restorable = find_restorable(root, Chain(root).read())
        other = Amnesiac(SETTINGS)
        with pytest.raises(ContractViolation):
            await export_commit(root, other, restorable, model=model, epoch=1)
        assert not (root.path / "export-1").exists()
        await other.shutdown()

    anyio.run(main)
