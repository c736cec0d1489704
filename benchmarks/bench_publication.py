"""P5: what a publication costs, by transport, against a plain copy of the same bytes.

A model of ``--megabytes`` goes from this process to embedded engines (child processes) through the
whole transaction: pause, transfer, verification of every tensor, policy id, resume. Transports take
turns, ``--rounds`` times. ``pause_s`` is what a running request sees; ``overhead_s`` is the part of
it that is not transfer. ``copy_gb_per_s`` is a memory copy of the same size in the same rounds.

    python -m benchmarks.bench_publication --megabytes 256 --rounds 5 --out p5.json
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.reporting import quiet_load, report
from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.decision import Decision
from runtime.publication.disk import DiskTransport
from runtime.publication.groups import GroupPlan
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import ONLY_SHA256, Target
from runtime.publication.safetensors_file import spec_of
from runtime.publication.sender import BroadcastSender
from runtime.publication.sharing import WeightSharing
from runtime.publication.snapshot import write_snapshot
from runtime.publication.told import Description, SharedWeights, WrittenSnapshot
from runtime.publication.transaction import Publisher


class Weights:
    """The trainer's side: a model's parameters, moved a little before each publication."""

    def __init__(self, model: Any) -> None:
        self.named = [(n, p.detach()) for n, p in model.named_parameters()]
        self.num_bytes = sum(t.nbytes for _, t in self.named)
        self.sender = BroadcastSender(self)
        self.sharing = WeightSharing(self)

    def weight_specs(self) -> list[TensorSpec]:
        """Specs of all parameters."""
        return [spec_of(name, tensor) for name, tensor in self.named]

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of at most ``bucket_bytes``."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in self.named:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        yield bucket

    def train(self) -> None:
        """Change every tensor."""
        for _, tensor in self.named:
            tensor.view(-1)[:1].add_(1.0)

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """For the disk transport."""
        return await anyio.to_thread.run_sync(write_snapshot, self, folder, kinds)

    async def share_weights(
        self, place: int, folder: str, kinds: frozenset[WeightHash]
    ) -> SharedWeights:
        """For the ipc transport."""
        shared = await anyio.to_thread.run_sync(self.sharing.share, place, folder, kinds)
        assert shared is not None
        return shared

    async def describe(self, kinds: frozenset[WeightHash] = ONLY_SHA256) -> Description:
        """For the broadcast transport, as all below."""
        return await anyio.to_thread.run_sync(self.sender.describe, kinds)

    async def free_port(self, host: str) -> int:
        """A port of this host."""
        return self.sender.free_port(host)

    async def open_group(self, plan: GroupPlan, timeout_s: float) -> None:
        """Join as rank 0."""
        await anyio.to_thread.run_sync(self.sender.open_group, plan, timeout_s)

    async def send_bucket(self, index: int, flat: bool, count: int = 1) -> None:
        """Send some buckets."""
        await anyio.to_thread.run_sync(self.sender.send_bucket, index, flat, count)

    async def abort(self) -> None:
        """Leave the group."""
        await anyio.to_thread.run_sync(self.sender.abort)


def make_model(folder: Path, megabytes: int) -> Any:
    """A float32 model of about that size, saved for the engines."""
    hidden = 512
    per_layer = 4 * (4 * hidden * hidden + 3 * hidden * 2048)
    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, intermediate_size=2048, max_position_embeddings=512,
        num_hidden_layers=max(1, megabytes * 1_000_000 // per_layer), tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def copy_gb_per_s(num_bytes: int) -> float:
    """Best of three copies between buffers that were touched before."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    to = torch.ones(num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        to.copy_(source)
        best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e9


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all transports."""
    model = make_model(folder / "model", arguments.megabytes)
    weights = Weights(model)
    settings = EngineSettings(model_path=str(folder / "model"), max_total_tokens=4096)
    owners = [EmbeddedOwner(slot=i, settings=settings) for i in range(arguments.engines)]
    rows: dict[str, list[dict[str, float]]] = {"disk": [], "broadcast": [], "ipc": []}
    copies: list[float] = []
    try:
        addresses = [owner.start() for owner in owners]
        processes = [psutil.Process(), *(psutil.Process(a.pid) for a in addresses)]
        clients = [HttpEngineClient(a.url) for a in addresses]
        targets = [
            Target(slot=a.slot, incarnation=a.incarnation, client=c)
            for a, c in zip(addresses, clients, strict=True)
        ]

        async def kill(slot: int, incarnation: str, reason: str) -> None:
            raise RuntimeError(f"engine {slot} failed in a benchmark: {reason}")

        publishers = {
            transport.name: Publisher(
                transport=transport, kill=kill, record_path=folder / f"{transport.name}.jsonl"
            )
            for transport in (
                DiskTransport(weights),
                BroadcastTransport(weights),
                IpcTransport(weights),
            )
        }
        update = 0
        for at in range(arguments.rounds + 1):
            copies.append(copy_gb_per_s(weights.num_bytes))
            for name, publisher in publishers.items():
                update += 1
                weights.train()
                before = _cpu_s(processes)
                start = time.perf_counter()
                decision = await publisher.publish(PolicyId(1, update), targets, mode="refresh")
                total_s = time.perf_counter() - start
                if at > 0:  # the first round makes groups, folders and pages
                    rows[name].append(_row(decision, total_s, _cpu_s(processes) - before))
        for publisher in publishers.values():
            await publisher.close()
        for client in clients:
            await client.close()
    finally:
        for owner in owners:
            owner.stop()
    return {
        "num_bytes": weights.num_bytes,
        "copy_gb_per_s": statistics.median(copies),
        "transports": {name: _summary(found, weights.num_bytes) for name, found in rows.items()},
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def _row(decision: Decision, total_s: float, cpu_s: float) -> dict[str, float]:
    assert decision.pause_s is not None
    return {
        "total_s": total_s,
        "cpu_s": cpu_s,
        "pause_s": decision.pause_s,
        "overhead_s": decision.pause_s - decision.stages_s["transfer"],
        **{f"stage_{stage}_s": s for stage, s in decision.stages_s.items()},
    }


def _summary(rows: list[dict[str, float]], num_bytes: int) -> dict[str, Any]:
    columns = {key: sorted(row[key] for row in rows) for key in rows[0]}
    medians = {key: round(statistics.median(values), 5) for key, values in columns.items()}
    spread = {key: [round(v[0], 5), round(v[-1], 5)] for key, v in columns.items()}
    rate = num_bytes / medians["stage_transfer_s"] / 1e9
    return {"median": medians, "spread": spread, "transfer_gb_per_s": round(rate, 3)}


def main() -> None:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--any-load", action="store_true", help="start above a load of 0.5 too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = quiet_load(any_load=arguments.any_load)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = anyio.run(measure, Path(folder), arguments)
    found |= {"benchmark": "P5", "engines": arguments.engines, "rounds": arguments.rounds}
    report(found, load=load, out=arguments.out)


if __name__ == "__main__":
    main()
