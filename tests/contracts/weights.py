"""What tests of weight updates ask of an engine, and what it answers."""

from __future__ import annotations

import torch

from tests.contracts.conftest import Models, RunningEngine
from tests.contracts.lane import LANE

PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)


def folder(models: Models, name: str) -> str:
    return str(models.folders[name])


def tensors(models: Models, name: str) -> dict[str, torch.Tensor]:
    """The weights as a trainer exports them: tied ones once."""
    named = models.models[name].named_parameters()
    return {k: v.detach().to(LANE.dtype, copy=True) for k, v in named}


async def engine_checksums(engine: RunningEngine) -> dict[str, str]:
    answer = await engine.post("/weights_checker", {"action": "checksum"})
    assert answer.status == 200
    return answer.body["ranks"][0]["checksums"]


async def swap_from_disk(engine: RunningEngine, path: str, version: str, **fields: object):
    body = {"model_path": path, "weight_version": version, **fields}
    return await engine.post("/update_weights_from_disk", body)
