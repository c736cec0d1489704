import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import DiskFull, PartialWrite
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import OptimizerSettings, TrainerSettings
from runtime.trainer.torch import staging
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.record import RNG_CPU, RankRecord
from runtime.trainer.torch.update import Update

MakeBatch = Callable[..., TrainBatch]
SETTINGS = TrainerSettings(optimizer=OptimizerSettings(lr=1e-2), max_skipped_steps=3)


def trainer(folder: Path, **changes: object) -> TorchTrainer:
    made = TorchTrainer(dataclasses.replace(SETTINGS, **changes))  # type: ignore[arg-type]
    made.load(str(folder))
    return made


def weights(one: TorchTrainer) -> list[torch.Tensor]:
    return [t.clone() for bucket in one.export_weights(1 << 30) for _, t in bucket]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_goes_on_as_if_nothing_had_happened(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path, dtype: str
) -> None:
    first = trainer(model_folder, dtype=dtype)
    for update in (1, 2):
        first.train_step(make_batch(update))
    names = first.write_staged(first.stage().token, str(tmp_path))
    assert sorted(names) == sorted(p.name for p in tmp_path.iterdir())
    drawn = torch.rand(3)
    want = [first.train_step(make_batch(u)).values["loss"] for u in (3, 4)]

    second = trainer(model_folder, dtype=dtype, seed=99)
    assert second.restore(str(tmp_path)) == {"update": 2, "consumed_digest": "digest-2"}
    assert torch.equal(torch.rand(3), drawn), "the RNG goes on where it stood"
    assert [second.train_step(make_batch(u)).values["loss"] for u in (3, 4)] == want
    assert same(weights(first), weights(second))


def test_a_staged_copy_is_a_copy(model_folder: Path, make_batch: MakeBatch, tmp_path: Path) -> None:
    one = trainer(model_folder)
    one.train_step(make_batch(1))
    before = weights(one)
    staged = one.stage()
    one.train_step(make_batch(2))  # changes the very memory that was staged
    one.write_staged(staged.token, str(tmp_path))
    again = trainer(model_folder)
    assert again.restore(str(tmp_path))["update"] == 1
    assert same(weights(again), before)
    assert not same(weights(one), before)


def test_copies_use_their_pages_again(model_folder: Path, tmp_path: Path) -> None:
    one = trainer(model_folder)
    staging = one._staging

    def pages(token: str) -> dict[str, int]:
        return {n: b.data_ptr() for n, b in staging._held[token].buffers.items()}

    first = one.stage()
    held = pages(first.token)
    second = one.stage()  # while the first is not written: other memory
    assert set(pages(second.token).values()).isdisjoint(held.values())
    one.write_staged(first.token, str(tmp_path))
    third = one.stage()
    assert pages(third.token) == held


def test_what_is_copied_beside_training_is_not_changed_by_it(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer waits for a copy under way, the passes before it do not."""
    one = trainer(model_folder)
    one._staging._at_once_bytes = 0
    one.train_step(make_batch(1))
    before = weights(one)
    passed = threading.Event()
    real_copy, real_pass = staging._copy, Update.accumulate

    def late(*args: object) -> None:
        assert passed.wait(20), "the forward and backward passes waited for the copy"
        real_copy(*args)  # type: ignore[arg-type]

    def told(self: Update, *args: object, **named: object) -> dict[str, float]:
        sums = real_pass(self, *args, **named)  # type: ignore[arg-type]
        passed.set()
        return sums

    monkeypatch.setattr(staging, "_copy", late)
    monkeypatch.setattr(Update, "accumulate", told)
    staged = one.stage()
    values = one.train_step(make_batch(2)).values
    assert values["elapsed_s/staging_wait"] >= 0
    one.write_staged(staged.token, str(tmp_path))
    again = trainer(model_folder)
    assert again.restore(str(tmp_path))["update"] == 1
    assert same(weights(again), before)
    assert not same(weights(one), before)


def test_a_copy_that_fails_fails_the_step_that_needs_it(
    model_folder: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(model_folder)

    def none_left(*_: object) -> None:
        raise RuntimeError("no host memory")

    monkeypatch.setattr(staging, "_copy", none_left)
    one.stage()
    with pytest.raises(RuntimeError, match="no host memory"):
        one.train_step(make_batch(1))


def test_files_are_hashed_while_they_grow(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(300, 1000, generator=made),
        "byte": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5, 3, generator=made).bfloat16(),
        "b": torch.randn(3_000_000, generator=made),
    }
    record = RankRecord(
        rank=0, world_size=1, update=3, consumed_digest="", optimizer_steps=1, skipped_steps=0,
        slices={},
    )  # fmt: skip
    held = staging.Staging(at_once_bytes=0)
    digests = held.write(held.stage(tensors, record).token, tmp_path)
    assert digests.keys() == {p.name for p in tmp_path.iterdir()}
    for name, digest in digests.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    stored = load_file(tmp_path / "trainer-00000-of-00001.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_a_copy_is_written_once(model_folder: Path, tmp_path: Path) -> None:
    one = trainer(model_folder)
    staged = one.stage()
    one.write_staged(staged.token, str(tmp_path))
    with pytest.raises(KeyError):
        one.write_staged(staged.token, str(tmp_path))


def test_writing_runs_beside_training(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(model_folder)
    staged = one.stage()
    is_writing, may_finish = threading.Event(), threading.Event()
    real = staging.write_tensors

    def slow(path: Path, tensors: dict[str, torch.Tensor]) -> str:
        is_writing.set()
        assert may_finish.wait(20)
        return real(path, tensors)

    monkeypatch.setattr(staging, "write_tensors", slow)
    writer = threading.Thread(target=one.write_staged, args=(staged.token, str(tmp_path)))
    writer.start()
    assert is_writing.wait(20)
    one.train_step(make_batch(1))
    may_finish.set()
    writer.join(20)
    again = trainer(model_folder)
    assert again.restore(str(tmp_path))["update"] == 0


def test_a_full_disk_frees_the_copy_and_says_so(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(model_folder)
    staged = one.stage()

    real = os.pwrite

    def full(fd: int, data: memoryview, at: int) -> int:
        if at > 3000:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull):
            one.write_staged(staged.token, str(tmp_path))
    assert not one._staging._held
    one.write_staged(one.stage().token, str(tmp_path))  # the next commit makes it good


def test_files_hold_tensors_and_plain_json(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    one = trainer(model_folder)
    one.train_step(make_batch(1))
    one.write_staged(one.stage().token, str(tmp_path))
    record = json.loads((tmp_path / "trainer-00000-of-00001.json").read_text())
    assert (record["update"], record["consumed_digest"]) == (1, "digest-1")
    assert record["schema_version"] == 1
    tensors = load_file(tmp_path / "trainer-00000-of-00001.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"master", "exp_avg", "exp_avg_sq", RNG_CPU}
    assert all(tensors[n].any() for n in tensors if n.startswith("exp_avg_sq/"))


def damage_truncate(folder: Path) -> None:
    path = folder / "trainer-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_json(folder: Path) -> None:
    (folder / "trainer-00000-of-00001.json").write_text("{")


def damage_missing(folder: Path) -> None:
    (folder / "trainer-00000-of-00001.safetensors").unlink()


def damage_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def damage_ranks(folder: Path) -> None:
    path = folder / "trainer-00000-of-00001.json"
    path.write_text(path.read_text().replace('"world_size":1', '"world_size":2'))


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_json, damage_missing, damage_all, damage_ranks]
)
def test_damaged_files_are_named(
    model_folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    one = trainer(model_folder)
    one.write_staged(one.stage().token, str(tmp_path))
    damage(tmp_path)
    with pytest.raises(PartialWrite, match=str(tmp_path)):
        trainer(model_folder).restore(str(tmp_path))


def test_skipped_steps_are_counted_across_a_resume(
    model_folder: Path, make_batch: MakeBatch, tmp_path: Path
) -> None:
    one = trainer(model_folder)
    batch = make_batch(1)
    broken = dataclasses.replace(batch.sequences[0], advantage=float("inf"))
    one.train_step(dataclasses.replace(batch, sequences=(broken, *batch.sequences[1:])))
    one.write_staged(one.stage().token, str(tmp_path))
    again = trainer(model_folder)
    again.restore(str(tmp_path))
    assert again.train_step(make_batch(2)).values["skipped_steps_total"] == 1
