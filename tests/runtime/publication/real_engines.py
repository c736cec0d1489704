"""Real embedded servers on loopback, and a trainer whose weights are a small transformers model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch

from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.server import Server
from runtime.engines.embedded.settings import EngineSettings
from runtime.publication.groups import GroupPlan
from runtime.publication.protocol import ONLY_SHA256, Target
from runtime.publication.safetensors_file import spec_of
from runtime.publication.sender import BroadcastSender
from runtime.publication.sharing import WeightSharing
from runtime.publication.snapshot import write_snapshot
from runtime.publication.told import Description, SharedWeights, WrittenSnapshot


class ModelTrainer:
    """Exports a model's weights; ``train`` moves every one of them. Implements both sources."""

    def __init__(self, model: Any, bucket_bytes: int = 4096) -> None:
        self.model = model
        self.bucket_bytes = bucket_bytes
        self.sender = BroadcastSender(self, bucket_bytes=bucket_bytes)
        self.sharing = WeightSharing(self, bucket_bytes=bucket_bytes)

    def _unique(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())  # tied weights once

    def weight_specs(self):
        return [spec_of(name, tensor) for name, tensor in self._unique()]

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in self._unique():
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor.detach()))
            size += tensor.nbytes
        yield bucket

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)

    async def write_snapshot(self, folder: str, kinds=ONLY_SHA256) -> WrittenSnapshot:
        return write_snapshot(self, folder, kinds)

    async def share_weights(self, place: int, folder: str, kinds=ONLY_SHA256) -> SharedWeights:
        return self.sharing.share(place, folder, kinds)

    async def describe(self, kinds=ONLY_SHA256) -> Description:
        return self.sender.describe(kinds)

    async def free_port(self, host: str) -> int:
        return self.sender.free_port(host)

    async def open_group(self, plan: GroupPlan, timeout_s: float) -> None:
        await anyio.to_thread.run_sync(self.sender.open_group, plan, timeout_s)

    async def send_bucket(self, index: int, flat: bool, count: int = 1) -> None:
        await anyio.to_thread.run_sync(self.sender.send_bucket, index, flat, count)

    async def abort(self) -> None:
        await anyio.to_thread.run_sync(self.sender.abort)


@asynccontextmanager
async def engines(folder: Path, count: int, **settings: Any) -> AsyncIterator[list[Target]]:
    """``count`` servers in this loop, each with a client; weights as in ``folder``."""
    async with AsyncExitStack() as stack:
        targets: list[Target] = []
        for slot in range(count):
            server = await stack.enter_async_context(
                Server(EngineSettings(model_path=str(folder), **settings))
            )
            client = await stack.enter_async_context(HttpEngineClient(server.url))
            targets.append(Target(slot=slot, incarnation=f"i{slot}", client=client))
        yield targets
