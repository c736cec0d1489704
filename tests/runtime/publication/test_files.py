"""Snapshots as files, scratch folders, and who may write them over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from runtime.errors import ContractViolation, DiskFull, EngineRefused, PartialWrite
from runtime.policy import PolicyId
from runtime.publication.checksum import Checksums, checksums, tensor_checksum
from runtime.publication.disk import DiskTransport
from runtime.publication.safetensors_file import INDEX, SafetensorsFile, plan_shards, spec_of
from runtime.publication.scratch import Scratch, sweep
from runtime.publication.snapshot import write_snapshot
from tests.runtime.publication.tiny_engines import (
    Faults,
    Journal,
    TinyEngine,
    TinyTrainer,
    target,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
P1, P2, P3 = PolicyId(1, 1), PolicyId(1, 2), PolicyId(1, 3)


class Weights:
    """Exports given tensors, several to a bucket."""

    def __init__(self, named) -> None:
        self.named = named

    def weight_specs(self):
        return [spec_of(name, tensor) for name, tensor in self.named]

    def export_weights(self, bucket_bytes: int):
        for at in range(0, len(self.named), 2):
            yield self.named[at : at + 2]


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


tensors = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()
).map(lambda t: _made(*t))


def _made(dtype: torch.dtype, shape: list[int], transposed: bool) -> torch.Tensor:
    made = torch.randint(0, 100, shape).to(dtype)
    return made.t() if transposed and made.dim() == 2 else made


@settings(max_examples=60, deadline=None)
@given(made=st.lists(tensors, min_size=1, max_size=8), shard_bytes=st.integers(1, 400))
def test_what_the_library_reads_is_what_was_exported(tmp_path_factory, made, shard_bytes):
    folder = tmp_path_factory.mktemp("s")
    named = [(f"t{i}", tensor) for i, tensor in enumerate(made)]
    written = write_snapshot(Weights(named), str(folder), shard_bytes=shard_bytes)
    found = read(folder)
    assert set(found) == {name for name, _ in named}
    for name, tensor in named:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert checksums(found.items()).items() == written.checksums.items()
    assert written.num_bytes == sum(t.nbytes for t in made)
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(shards) > 1:
        index = json.loads((folder / INDEX).read_text())
        assert set(index["weight_map"]) == set(found)
        assert set(index["weight_map"].values()) == set(shards)
        for name, shard in index["weight_map"].items():
            assert name in load_file(folder / shard)


def test_a_folder_is_written_over_by_a_smaller_snapshot(tmp_path):
    large = [(f"t{i}", torch.randn(50)) for i in range(6)]
    write_snapshot(Weights(large), str(tmp_path), shard_bytes=300)
    small = [("t0", torch.randn(3))]
    written = write_snapshot(Weights(small), str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert checksums(read(tmp_path).items()) == written.checksums


def test_a_longer_file_of_the_same_name_is_cut_off(tmp_path):
    for size in (1000, 3):
        named = [("t", torch.randn(size))]
        write_snapshot(Weights(named), str(tmp_path))
    assert torch.equal(read(tmp_path)["t"], named[0][1])
    assert (tmp_path / "model.safetensors").stat().st_size < 200


@given(made=st.lists(tensors, min_size=1, max_size=6))
def test_every_tensor_is_aligned_so_that_it_can_be_mapped(tmp_path_factory, made):
    folder = tmp_path_factory.mktemp("s")
    write_snapshot(Weights([(f"t{i}", tensor) for i, tensor in enumerate(made)]), str(folder))
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for i, tensor in enumerate(made):
        start, _ = header[f"t{i}"]["data_offsets"]
        assert (8 + length + start) % tensor.itemsize == 0


def test_pages_of_an_older_snapshot_are_used_again(tmp_path):
    named = [("t", torch.randn(100))]
    write_snapshot(Weights(named), str(tmp_path))
    before = (tmp_path / "model.safetensors").stat().st_ino
    write_snapshot(Weights(named), str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_ino == before


class Liar(Weights):
    """Exports something else than its specs say."""

    def __init__(self, exported, announced) -> None:
        super().__init__(exported)
        self.announced = announced
        self.num_walked = 0

    def weight_specs(self):
        return [spec_of(name, tensor) for name, tensor in self.announced]

    def export_weights(self, bucket_bytes: int):
        for bucket in super().export_weights(bucket_bytes):
            self.num_walked += 1
            yield bucket


A, B, C, D, E = ((name, torch.zeros(2)) for name in "abcde")
WRONG_SHAPE = ("a", torch.zeros(3))
WRONG_DTYPE = ("a", torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize(
    "exported",
    [[A, B, C], [A, B, C, D, E], [WRONG_SHAPE, B, C, D], [WRONG_DTYPE, B, C, D], [A, A, B, C]],
)
def test_an_export_that_differs_from_its_specs_is_refused_after_its_last_bucket(tmp_path, exported):
    liar = Liar(exported, [A, B, C, D])
    with pytest.raises(ContractViolation):
        write_snapshot(liar, str(tmp_path))
    # The other ranks are in the export too: it is walked to its end whatever happens.
    assert liar.num_walked == -(-len(exported) // 2)


def test_a_full_disk_is_told_as_such_and_the_export_is_walked_to_its_end(tmp_path, monkeypatch):
    def full(fd, data, at):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    honest = Liar([A, B, C, D], [A, B, C, D])
    with pytest.raises(DiskFull):
        write_snapshot(honest, str(tmp_path))
    assert honest.num_walked == 2


def test_a_file_without_all_its_tensors_is_not_finished(tmp_path):
    specs = [spec_of(*A), spec_of(*B)]
    with SafetensorsFile(tmp_path / "f", specs) as file:
        file.add(*A)
        with pytest.raises(ContractViolation, match="lacks 1 tensors"):
            file.finish(durable=False)


@given(sizes=st.lists(st.integers(0, 30), min_size=1), limit=st.integers(1, 100))
def test_shards_hold_everything_in_order_within_their_limit(sizes, limit):
    specs = [spec_of(f"t{i}", torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    assert [s for shard in shards for s in shard.specs] == specs
    for shard in shards:
        assert sum(s.shape[0] for s in shard.specs) <= limit or len(shard.specs) == 1
    assert len({shard.file for shard in shards}) == len(shards)


@given(values=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), at=st.integers(0, 19))
def test_a_checksum_sees_every_bit_and_every_place(values, at):
    tensor = torch.tensor(values, dtype=torch.int32)
    other = tensor.clone()
    other[at % len(values)] ^= 1 << (at % 31)
    assert tensor_checksum(tensor) != tensor_checksum(other)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.view(torch.float32))
    if values != values[::-1]:
        assert tensor_checksum(tensor) != tensor_checksum(tensor.flip(0))


def test_checksums_by_threads_are_those_without(monkeypatch):
    monkeypatch.setattr("runtime.publication.checksum._INLINE_BYTES", 0)
    named = [(f"t{i}", torch.randn(1000)) for i in range(20)]
    with Checksums(1, ahead_bytes=5000) as sums:
        for name, tensor in named:
            sums.add(name, tensor)
        assert sums.result() == checksums(named)
        assert list(sums.result()) == [name for name, _ in named]
        assert sums.num_bytes == 20 * 4000


# Scratch


OWNER = """
import sys, time
from pathlib import Path
from runtime.publication.scratch import Scratch
print(Scratch(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_folders_of_dead_owners_are_swept_and_no_others(tmp_path):
    mine = Scratch(tmp_path)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OWNER,
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs = Path(child.stdout.readline().strip())
    (theirs / "0").mkdir()
    (theirs / "0" / "weights").write_text("x")
    unrelated = tmp_path / "milepost-notes"
    unrelated.mkdir()
    assert sweep(tmp_path) == []
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    assert sweep(tmp_path) == [theirs]
    assert {p.name for p in tmp_path.iterdir()} == {mine.path.name, "milepost-notes"}
    mine.close()
    mine.close()
    assert not mine.path.exists()


# Leases of the disk transport


class Disk:
    def __init__(self, tmp_path, num_engines: int = 2) -> None:
        self.faults = Faults()
        self.engines = [TinyEngine(i, Journal()) for i in range(num_engines)]
        for engine in self.engines:
            engine.paused = "in_place"
        self.trainer = TinyTrainer()
        self.transport = DiskTransport(self.trainer, tmp_path)

    async def publish(self, policy, deadline_s=5.0):
        self.trainer.update = policy.update
        snapshot = await self.transport.prepare(policy)
        targets = [target(e, self.faults) for e in self.engines]
        outcomes = await self.transport.transfer(
            snapshot, targets, flush=False, deadline_s=deadline_s
        )
        return Path(snapshot.path), outcomes


def test_two_folders_take_turns(tmp_path):
    async def main():
        disk = Disk(tmp_path)
        paths = []
        for policy, before in ((P1, None), (P2, P1), (P3, P2)):
            path, outcomes = await disk.publish(policy)
            assert all(o.error is None for o in outcomes)
            paths.append(path)
            if before is not None:
                await disk.transport.release(before)
        assert paths[0] != paths[1]
        assert paths[2] == paths[0]
        await disk.transport.close()
        assert list(tmp_path.iterdir()) == []

    anyio.run(main)


def test_a_folder_is_kept_while_an_engine_may_still_read_it(tmp_path):
    async def main():
        disk = Disk(tmp_path)
        disk.faults.plan[1, "update_from_disk"] = "hang"
        first, outcomes = await disk.publish(P1, deadline_s=0.2)
        assert outcomes[0].error is None
        assert outcomes[1].kind == "WaitTimeout"
        await disk.transport.release(P1)
        disk.faults.plan.clear()
        disk.engines = disk.engines[:1]
        second, _ = await disk.publish(P2)
        assert second != first
        await disk.transport.release(P2)
        await disk.transport.ended(1, "i1")  # it died: now nobody reads the first
        third, _ = await disk.publish(P3)
        assert third == first
        await disk.transport.close()

    anyio.run(main)


def test_a_refused_load_reads_nothing_any_more(tmp_path):
    async def main():
        disk = Disk(tmp_path, 1)
        disk.faults.plan[0, "update_from_disk"] = "refuse"
        first, (outcome,) = await disk.publish(P1)
        assert outcome.kind == EngineRefused.__name__
        await disk.transport.release(P1)
        again, _ = await disk.publish(P1)
        assert again == first
        await disk.transport.close()

    anyio.run(main)


@pytest.mark.parametrize("how", ["cut", "of fewer weights"])
def test_a_snapshot_that_is_not_whole_is_refused_while_engines_still_serve(tmp_path, how):
    async def main():
        disk = Disk(tmp_path)
        await disk.publish(P1)
        write = disk.trainer.write_snapshot

        async def torn(folder, kinds):
            written = await write(folder, kinds)
            if how == "cut":
                path = Path(folder) / "model.safetensors"
                os.truncate(path, path.stat().st_size - 1)
            else:
                write_snapshot(TinyTrainer(num_tensors=2), folder)
            return written

        disk.trainer.write_snapshot = torn
        with pytest.raises(PartialWrite):
            await disk.transport.prepare(P2)
        assert [engine.journal.of("load") for engine in disk.engines] == [[0], [1]]
        disk.trainer.write_snapshot = write
        _, outcomes = await disk.publish(P2)
        assert [outcome.error for outcome in outcomes] == [None, None]
        await disk.transport.close()

    anyio.run(main)


def test_a_client_that_refused_to_send_leaves_nobody_reading(tmp_path):
    async def main():
        disk = Disk(tmp_path, 1)
        load = disk.engines[0].update_from_disk

        async def refuses(path, policy, *, flush):
            raise PartialWrite("model.safetensors: its tensors end at 9, the file at 8 bytes")

        disk.engines[0].update_from_disk = refuses
        first, (outcome,) = await disk.publish(P1)
        assert outcome.kind == PartialWrite.__name__
        await disk.transport.release(P1)
        disk.engines[0].update_from_disk = load
        again, (outcome,) = await disk.publish(P1)
        assert (again, outcome.error) == (first, None)
        await disk.transport.close()

    anyio.run(main)
