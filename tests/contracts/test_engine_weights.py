"""Weights from a folder, and their version alone, the same for all engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.generating import LONG, generate
from tests.contracts.lane import LANE, assert_logprobs
from tests.contracts.tiny_models import (
    reference_logprobs,
)
from tests.contracts.weights import NOT_FLUSHED, engine_checksums, folder, swap_from_disk, tensors

pytestmark = pytest.mark.anyio


async def test_disk_update_serves_the_new_weights(engine_server: RunningEngine, models: Models):
    before = await engine_checksums(engine_server)
    answer = await swap_from_disk(engine_server, folder(models, "b"), "v1")

    assert (answer.status, answer.body) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to v1.",
            "num_paused_requests": 0,
        },
    )
    sums = await engine_checksums(engine_server)
    assert sums == LANE.checksums(tensors(models, "b").items())
    assert before == LANE.checksums(tensors(models, "a").items())
    sample = (await engine_server.post("/generate", generate(return_logprob=True))).body
    assert sample["meta_info"]["weight_version"] == "v1"
    found = torch.tensor([t[0] for t in sample["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["b"], [1, 2, 3], sample["output_ids"])
    assert_logprobs(found, expected)


def _missing_weight(weights: dict[str, torch.Tensor]) -> None:
    weights.popitem()


def _extra_weight(weights: dict[str, torch.Tensor]) -> None:
    weights["model.extra"] = torch.zeros(3)


def _other_shape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(7)


@only_on("embedded", "SGLang loads what it can of such a folder")
@pytest.mark.parametrize("spoil", [_missing_weight, _extra_weight, _other_shape])
async def test_a_folder_that_does_not_fit_changes_nothing(
    engine_server: RunningEngine,
    models: Models,
    tmp_path: Path,
    spoil: Callable[[dict[str, torch.Tensor]], None],
):
    weights = tensors(models, "b")
    spoil(weights)
    save_file(weights, tmp_path / "model.safetensors")
    before = await engine_checksums(engine_server)
    for path in (str(tmp_path), "/nope"):
        answer = await swap_from_disk(engine_server, path, "v9")
        assert answer.status == 400
        assert answer.body["success"] is False
        assert answer.body["message"].startswith("Failed to get weights iterator: ")
    assert await engine_checksums(engine_server) == before
    assert (await engine_server.get("/model_info")).body["weight_version"] == "default"


async def test_torn_file_changes_nothing(
    engine_server: RunningEngine, models: Models, tmp_path: Path
):
    """Cut at each kind of place, and longer than it says; SGLang would end without our hook."""
    whole = save(tensors(models, "b"))
    header_end = 8 + int.from_bytes(whole[:8], "little")
    cuts = (0, 4, 8, header_end // 2, header_end, len(whole) // 2, len(whole) - 1)
    before = await engine_checksums(engine_server)
    for data in (*(whole[:cut] for cut in cuts), whole + b"\0"):
        (tmp_path / "model.safetensors").write_bytes(data)
        answer = await swap_from_disk(engine_server, str(tmp_path), "v9")
        assert (answer.status, answer.body["success"]) == (400, False)
        assert answer.body["message"].startswith("Failed to get weights iterator: ")
    assert await engine_checksums(engine_server) == before
    assert (await engine_server.get("/model_info")).body["weight_version"] == "default"
    assert (await engine_server.post("/generate", generate())).status == 200


@only_on("embedded", "SGLang waits for the running requests, unless it was paused")
async def test_flushing_update_under_running_requests_fails_though_weights_changed(
    engine_server: RunningEngine, models: Models
):
    """Upstream's own trap, kept: always pause first."""
    async with engine_server.stream(LONG) as running:
        await running.tokens(1)
        answer = await swap_from_disk(engine_server, folder(models, "b"), "v2")
        assert (answer.status, answer.body) == (400, {"success": False, "message": NOT_FLUSHED})
    assert (await engine_server.get("/model_info")).body["weight_version"] == "v2"


async def test_version_alone(engine_server: RunningEngine):
    answer = await engine_server.post("/update_weight_version", {"new_version": "v7"})
    assert answer.status == 200
    assert answer.body["new_version"] == "v7"
    assert (await engine_server.get("/model_info")).body["weight_version"] == "v7"


async def test_version_alone_can_leave_requests_running(engine_server: RunningEngine):
    async with engine_server.stream({**LONG, "rid": "r"}) as running:
        await running.tokens(2)
        body = {"new_version": "v8", "abort_all_requests": False}
        await engine_server.post("/update_weight_version", body)
        while (event := await running.next())["meta_info"]["weight_version"] != "v8":
            pass
        await running.tokens(len(event["output_ids"]) + 2)
        await engine_server.post("/abort_request", {"rid": "r"})
        last = await running.last()
    assert last["meta_info"]["weight_version"] == "v8"
    if engine_server.tells_spans:
        assert [s["version"] for s in last["meta_info"]["weight_versions"]] == ["default", "v8"]
