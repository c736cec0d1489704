"""A real server in one broadcast with an engine that leaves it half-way.

One that waits for buckets of which no more come must answer, and take the whole of the next try.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import pytest
import torch

from runtime.engines.client import HttpEngineClient
from runtime.engines.collective import CollectiveGroup
from runtime.engines.protocol import EngineInfo
from runtime.errors import EngineRefused, ServingError
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.protocol import Target
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.lane import LANE
from tests.contracts.weights import engine_checksums, tensors
from tests.runtime.publication.real_engines import ModelTrainer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Trained(torch.nn.Module):
    """The weights that a trainer exports, by their own names."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.weights.items()


class HalfWay:
    """An engine that is in the group and takes one bucket."""

    def __init__(self, end: Exception) -> None:
        self._end = end

    async def info(self) -> EngineInfo:
        return EngineInfo(
            version="x", vocab_size=8, context_length=8, max_running_requests=1,
            native_spans=False, takes_salt=True, update_bracket=False, own_buckets=True,
            own_broadcast=True,
        )  # fmt: skip

    async def begin_update(self) -> None: ...

    async def end_update(self) -> None: ...

    async def init_update_group(self, **plan: Any) -> None:
        plan["rank"] = plan.pop("rank_offset")
        self._group = await anyio.to_thread.run_sync(
            lambda: CollectiveGroup(**plan, timeout_s=60.0)
        )

    async def destroy_update_group(self, name: str) -> None:
        self._group.close()

    async def update_from_distributed(
        self, specs: Sequence[Any], *, sizes: Sequence[int], **how: Any
    ) -> None:
        first = [torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for s in specs[: sizes[0]]]
        one = ((sum(tensor.nbytes for tensor in first),), torch.uint8)
        await anyio.to_thread.run_sync(self._group.receive, [one])
        if not isinstance(self._end, EngineRefused):
            self._group.close()
        raise self._end


@only_on("sglang", "the embedded engine takes a bucket a call")
@pytest.mark.skipif(LANE.device == "cuda", reason="inside NCCL whoever waits for it is lost, too")
@pytest.mark.parametrize(
    "end", [ServingError("gone"), EngineRefused("no")], ids=["dies", "refuses"]
)
async def test_an_engine_that_leaves_half_way_takes_nobody_with_it(
    engine_server: RunningEngine, models: Models, end: Exception
):
    trainer = ModelTrainer(Trained(tensors(models, "b")), bucket_bytes=4096)
    transport = BroadcastTransport(trainer, group_timeout_s=30.0)
    async with HttpEngineClient(engine_server.url, api_key=engine_server.api_key) as client:
        snapshot = await transport.prepare(PolicyId(1, 1))
        assert len(transport._described[PolicyId(1, 1)].buckets) > 3
        targets = [
            Target(slot=0, incarnation="half", client=HalfWay(end)),  # type: ignore[arg-type]
            Target(slot=1, incarnation="whole", client=client),
        ]
        half, whole = await transport.transfer(snapshot, targets, flush=False, deadline_s=100)
        assert (half.error, whole.error) == (str(end), None)
        assert await engine_checksums(engine_server) == snapshot.digests["sha256"]
        await transport.close()
