"""Trainer ranks and engines as they lie on four and eight GPUs, here over gloo, against one rank.

Two ranks with two engines, four with four: each rank holds a shard, rank 0 sends what all of them
gather, and every engine ends with the weights that one rank alone would have made.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from transformers import Qwen3ForCausalLM

from runtime.policy import PolicyId
from runtime.publication.adapter import AdapterTransport
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.disk import DiskTransport
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import ONLY_SHA256
from runtime.publication.transaction import Publisher
from runtime.trainer.operations import Operation
from runtime.trainer.protocol import TrainBatch
from runtime.trainer.rank import RankServer
from runtime.trainer.settings import LoraSettings, OptimizerSettings, TrainerSettings
from tests.runtime.publication.real_engines import engines
from tests.runtime.trainer.tiny import make_sequences, tiny_config

pytestmark = pytest.mark.timeout(240)

SETTINGS = TrainerSettings(
    optimizer=OptimizerSettings(lr=1e-3), max_tokens_per_bin=64, max_mean_logprob_gap=100.0
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("layouts") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        Qwen3ForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


def batch(update: int) -> TrainBatch:
    return TrainBatch(update=update, sequences=make_sequences(update), consumed_digest=str(update))


def weights_of(server: RankServer) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in server.backend.export_weights(4096) for n, t in bucket}


def rank_main(rank: int, size: int, pipe: Connection, settings: TrainerSettings) -> None:
    """Answer calls until told to end; ``weights`` and ``port`` beside those of the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    server = RankServer(settings, rank=rank, size=size, epoch=0)
    while (call := pipe.recv()) is not None:
        method, args = call
        try:
            match method:
                case "weights":
                    answer: Any = weights_of(server)
                case "listen" | "join" | "free_port" | "abort_broadcast":
                    answer = getattr(server, method)(*args)
                case _:
                    serial, args = args[0], args[1:]
                    operation = Operation(epoch=0, update=0, name=method, serial=serial)
                    answer = server.step(operation, method, *args)
        except Exception as error:  # told, so that the test fails with it
            answer = error
        pipe.send(answer if rank == 0 or isinstance(answer, Exception) else None)
    server.stop()


class Ranks:
    """The trainer group of these tests: every rank is called with the same operations."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self._serial = 0

    def call(self, method: str, *args: Any, only: int | None = None) -> Any:
        pipes = self._pipes if only is None else [self._pipes[only]]
        for pipe in pipes:
            pipe.send((method, args))
        answers = [pipe.recv() for pipe in pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers[0]

    def step(self, method: str, *args: Any) -> Any:
        self._serial += 1
        return self.call(method, self._serial, *args)

    async def describe(self, kinds=ONLY_SHA256):
        return await anyio.to_thread.run_sync(self.step, "describe", kinds)

    async def share_weights(self, place, folder, kinds):
        return await anyio.to_thread.run_sync(self.step, "share_weights", place, folder, kinds)

    async def write_snapshot(self, folder, kinds=ONLY_SHA256):
        return await anyio.to_thread.run_sync(self.step, "write_snapshot", folder, kinds)

    async def write_adapter(self, folder, kinds=ONLY_SHA256):
        return await anyio.to_thread.run_sync(self.step, "write_adapter", folder, kinds)

    async def digest_base(self, kinds):
        return await anyio.to_thread.run_sync(self.step, "digest_base", kinds)

    async def free_port(self, host):
        return self.call("free_port", host, only=0)

    async def open_group(self, plan, timeout_s):
        await anyio.to_thread.run_sync(self.step, "open_group", plan, timeout_s)

    async def send_bucket(self, index, flat, count=1):
        await anyio.to_thread.run_sync(self.step, "send_bucket", index, flat, count)

    async def abort(self):
        await anyio.to_thread.run_sync(self.call, "abort_broadcast")


@contextmanager
def ranks_of(size: int, model: Path, settings: TrainerSettings = SETTINGS) -> Iterator[Ranks]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runtime.trainer.torch.backend"])
    pairs = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=rank_main, args=(rank, size, theirs, settings))
        for rank, (_, theirs) in enumerate(pairs)
    ]
    try:
        for process in processes:
            process.start()
        ranks = Ranks([ours for ours, _ in pairs])
        port = ranks.call("listen", "127.0.0.1", 60.0, only=0)
        ranks.call("join", "127.0.0.1", port, 60.0)
        ranks.step("load", str(model))
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def alone(model) -> dict[str, torch.Tensor]:
    """What one rank makes of the two updates."""
    server = RankServer(SETTINGS, rank=0, size=1, epoch=0)
    server.backend.load(str(model))
    for update in (1, 2):
        server.backend.train_step(batch(update))
    return weights_of(server)


TRANSPORTS = {
    "broadcast": lambda ranks, folder: BroadcastTransport(ranks, group_timeout_s=20.0),
    "disk": DiskTransport,
    "ipc": IpcTransport,
}


@pytest.mark.parametrize(
    ("size", "num_engines", "kinds"), [(2, 2, tuple(TRANSPORTS)), (4, 4, ("broadcast", "ipc"))]
)
def test_every_engine_holds_what_one_rank_alone_would_have_made(
    size, num_engines, kinds, model, alone, tmp_path
):
    async def main(ranks: Ranks):
        async with engines(model, num_engines) as targets:
            for update in (1, 2):
                ranks.step("train_step", batch(update))
            for serial, kind in enumerate(kinds):
                publisher = Publisher(
                    transport=TRANSPORTS[kind](ranks, tmp_path),
                    kill=None,
                    record_path=tmp_path / "publications.jsonl",
                )
                policy = PolicyId(1, 2 + serial)
                decision = await publisher.publish(policy, targets, mode="refresh")
                assert len(decision.verified) == num_engines, kind
                assert decision.num_bytes == sum(t.nbytes for t in alone.values())
                await publisher.close()
            held = [await target.client.checksums() for target in targets]
        return held

    with ranks_of(size, model) as ranks:
        held = anyio.run(main, ranks)
        made = ranks.call("weights")
    assert all(each == held[0] for each in held)
    assert set(held[0]) == set(made) == set(alone)
    for name, tensor in alone.items():
        torch.testing.assert_close(made[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_sharded_adapters_over_a_sharded_base_reach_every_engine(model, tmp_path):
    lora = LoraSettings(rank=4, alpha=8.0)
    adapted = dataclasses.replace(SETTINGS, lora=lora)

    async def main(ranks: Ranks):
        publisher = Publisher(
            transport=AdapterTransport(ranks, tmp_path),
            kill=None,
            record_path=tmp_path / "publications.jsonl",
        )
        async with engines(model, 2) as targets:
            for update in (1, 2):
                ranks.step("train_step", batch(update))
                decision = await publisher.publish(PolicyId(1, update), targets, mode="refresh")
                assert len(decision.verified) == 2
            held = [await target.client.checksums() for target in targets]
        await publisher.close()
        return held

    with ranks_of(2, model, adapted) as ranks:
        held = anyio.run(main, ranks)
        made = ranks.call("weights")
    assert held[0] == held[1]
    adapters = {name for name in held[0] if ".lora_" in name}
    assert set(held[0]) - adapters == set(made), "the base, under the names of the model"
    assert len(adapters) == 2 * 14
