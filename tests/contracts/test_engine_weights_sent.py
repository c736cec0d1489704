"""Weights that are sent, in the body or by broadcast, the same for all engines."""

from __future__ import annotations

import asyncio
import base64
import pickle
from typing import Any

import anyio.to_thread
import pytest
import torch
from safetensors.torch import save

from runtime.engines.collective import CollectiveGroup
from runtime.engines.held_port import HeldPort
from runtime.engines.own_format import broadcast_format
from runtime.publication.sender import Packed
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.generating import LONG, generate
from tests.contracts.lane import LANE
from tests.contracts.weights import NOT_FLUSHED, engine_checksums, tensors

pytestmark = pytest.mark.anyio


async def test_tensor_updates_need_the_bracket(engine_server: RunningEngine):
    if not engine_server.tells_spans:
        for path in ("/begin_weight_update", "/end_weight_update"):
            assert (await engine_server.post(path)).status == 404
        return
    for path, body in (
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
    ):
        answer = await engine_server.post(path, body)
        assert answer.status == 400
        assert answer.body["message"] == (
            f"{path[1:]} must run between begin_weight_update() and end_weight_update()"
        )
    assert (await engine_server.post("/begin_weight_update")).status == 200
    again = await engine_server.post("/begin_weight_update")
    assert (again.status, again.body["message"]) == (
        400,
        "a weight-update session is already open; call end_weight_update() first",
    )
    assert (await engine_server.post("/generate", generate())).status == 200
    assert (await engine_server.post("/end_weight_update")).status == 200
    assert (await engine_server.post("/end_weight_update")).status == 400


_unpickled: list[int] = []


class _Bomb:
    """Server and test share a process here, so an unpickled bomb would be seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_explode, ())


def _explode() -> None:
    _unpickled.append(1)


@only_on("embedded", "SGLang takes pickles; a bad one ends its server")
async def test_tensors_in_the_body(engine_server: RunningEngine, models: Models):
    weights = tensors(models, "b")
    names = list(weights)
    await engine_server.post("/begin_weight_update")
    for i, part in enumerate((names[:5], names[5:])):
        payload = base64.b64encode(save({n: weights[n] for n in part})).decode()
        body = {"serialized_named_tensors": [payload], "weight_version": f"t{i}"}
        answer = await engine_server.post("/update_weights_from_tensor", body)
        assert (answer.status, answer.body) == (
            200,
            {"success": True, "message": f"Success Weight version updated to t{i}."},
        )
    await engine_server.post("/end_weight_update")
    assert await engine_checksums(engine_server) == LANE.checksums(weights.items())


@only_on("embedded", "SGLang takes pickles; a bad one ends its server")
@pytest.mark.parametrize(
    "body",
    [
        {"serialized_named_tensors": ["AAAA"]},
        {"serialized_named_tensors": ["%%%"]},
        {"serialized_named_tensors": [base64.b64encode(pickle.dumps(_Bomb())).decode()]},
        {"serialized_named_tensors": [7]},
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": "x"},
        {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"},
        {
            "serialized_named_tensors": [
                base64.b64encode(save({"model.norm.weight": torch.zeros(7)})).decode()
            ]
        },
        {},
    ],
)
async def test_a_bad_tensor_body_is_refused_and_nothing_is_unpickled(
    engine_server: RunningEngine, body: dict[str, object]
):
    before = await engine_checksums(engine_server)
    await engine_server.post("/begin_weight_update")
    answer = await engine_server.post("/update_weights_from_tensor", body)
    assert answer.status == 400
    assert answer.body["success"] is False
    assert not _unpickled
    assert await engine_checksums(engine_server) == before


@only_on("embedded", "SGLang takes pickles; a bad one ends its server")
async def test_flush_after_retraction_is_refused_and_the_server_lives(
    engine_server: RunningEngine, models: Models
):
    """The third request that kills upstream's server."""
    payload = base64.b64encode(save(tensors(models, "b"))).decode()
    async with engine_server.stream(LONG) as running:
        await running.tokens(1)
        await engine_server.post("/pause_generation", {"mode": "retract"})
        await engine_server.post("/begin_weight_update")
        answer = await engine_server.post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [payload], "flush_cache": True},
        )
        assert (answer.status, answer.body["message"]) == (400, NOT_FLUSHED)
    await engine_server.post("/continue_generation")
    assert (await engine_server.get("/health_generate")).status == 200


async def _joined(engine: RunningEngine) -> CollectiveGroup:
    with HeldPort() as held:
        body = {
            "master_address": "127.0.0.1",
            "master_port": held.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
            "backend": "gloo",
        }
        answer = asyncio.ensure_future(engine.post("/init_weights_update_group", body))
        group = await anyio.to_thread.run_sync(
            lambda: CollectiveGroup(
                host="127.0.0.1", port=held.port, rank=0, world_size=2, name="g", timeout_s=20
            )
        )
    assert (await answer).body == {
        "success": True,
        "message": "Succeeded to initialize custom process group.",
    }
    return group


def _announcement(weights: dict[str, torch.Tensor], **fields: object) -> dict[str, object]:
    return {
        "names": list(weights),
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
        "shapes": [list(t.shape) for t in weights.values()],
        "group_name": "g",
        **fields,
    }


async def test_broadcast_update(engine_server: RunningEngine, models: Models):
    group = await _joined(engine_server)
    weights = tensors(models, "b")
    await engine_server.post("/begin_weight_update")
    answer = asyncio.ensure_future(
        engine_server.post(
            "/update_weights_from_distributed", _announcement(weights, weight_version="d1")
        )
    )
    await anyio.to_thread.run_sync(lambda: group.broadcast(list(weights.values())))
    assert (await answer).body == {
        "success": True,
        "message": "Succeeded to update parameter online. Weight version updated to d1.",
    }
    await engine_server.post("/end_weight_update")
    assert await engine_checksums(engine_server) == LANE.checksums(weights.items())
    destroyed = await engine_server.post("/destroy_weights_update_group", {"group_name": "g"})
    assert destroyed.status == 200
    again = await engine_server.post("/destroy_weights_update_group", {"group_name": "g"})
    assert (again.status, again.body["success"]) == (400, False)
    group.close()


@only_on("sglang", "the embedded engine takes a bucket a call")
async def test_all_buckets_of_a_broadcast_in_one_call(engine_server: RunningEngine, models: Models):
    facts = (await engine_server.get("/milepost")).body
    assert (facts["own_buckets"], facts["own_broadcast"]) == (True, True)
    group = await _joined(engine_server)
    weights = tensors(models, "b")
    parts = [list(weights.values())[:5], list(weights.values())[5:]]
    await engine_server.post("/begin_weight_update")
    announced = _announcement(weights, load_format=broadcast_format([len(p) for p in parts]))
    answer = asyncio.ensure_future(
        engine_server.post("/update_weights_from_distributed", announced)
    )
    buckets = [Packed.of(part).flat for part in parts]
    await anyio.to_thread.run_sync(lambda: group.broadcast(buckets))
    assert (await answer).status == 200
    await engine_server.post("/end_weight_update")
    assert await engine_checksums(engine_server) == LANE.checksums(weights.items())
    assert (
        await engine_server.post("/destroy_weights_update_group", {"group_name": "g"})
    ).status == 200
    group.close()


@only_on("embedded", "SGLang waits for the broadcast before it looks at the shapes")
async def test_an_announcement_that_does_not_fit_is_refused_before_anything_arrives(
    engine_server: RunningEngine, models: Models
):
    group = await _joined(engine_server)
    await engine_server.post("/begin_weight_update")
    for bad in (
        {"nope": torch.zeros(3)},
        {"model.norm.weight": torch.zeros(7)},
        {},
    ):
        answer = await engine_server.post("/update_weights_from_distributed", _announcement(bad))
        assert (answer.status, answer.body["success"]) == (400, False)
    answer = await engine_server.post(
        "/update_weights_from_distributed",
        _announcement(tensors(models, "b"), group_name="other"),
    )
    assert answer.status == 400
    group.close()


@only_on("embedded", "SGLang's scheduler takes no other call while it waits for a broadcast")
async def test_a_sender_that_leaves_fails_the_bucket_and_changes_nothing(
    engine_server: RunningEngine, models: Models
):
    group = await _joined(engine_server)
    before = await engine_checksums(engine_server)
    await engine_server.post("/begin_weight_update")
    answer = asyncio.ensure_future(
        engine_server.post("/update_weights_from_distributed", _announcement(tensors(models, "b")))
    )
    destroyed = await engine_server.post("/destroy_weights_update_group", {"group_name": "g"})
    assert destroyed.status == 200
    group.close()
    found = await answer
    assert (found.status, found.body["success"]) == (400, False)
    assert await engine_checksums(engine_server) == before
    assert (await engine_server.post("/generate", generate())).status == 200
