"""Pauses, weight updates and what they do to running requests, the same for all engines."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch
from safetensors.torch import save, save_file

from runtime.engines.client import HttpEngineClient
from runtime.engines.collective import CollectiveGroup
from runtime.engines.held_port import HeldPort
from runtime.policy import PolicyId
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.lane import LANE, agree, assert_logprobs
from tests.contracts.test_engine_contract import GREEDY, LONG, assert_version, generate
from tests.contracts.tiny_models import (
    CONTEXT,
    reference_after_swap,
    reference_logprobs,
)

pytestmark = pytest.mark.anyio

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


# Pauses


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_health_is_503_while_paused_and_requests_wait(
    engine_server: RunningEngine, mode: str
):
    answer = await engine_server.post("/pause_generation", {"mode": mode})
    assert (answer.status, answer.body) == (200, PAUSED)
    for path in ("/health", "/health_generate"):
        assert (await engine_server.get(path)).status == 503
    call = asyncio.ensure_future(engine_server.post("/generate", generate()))
    if engine_server.kind == "embedded":  # SGLang holds it in front of its queue
        await engine_server.until(waiting=1, running=0)
    assert not call.done()
    answer = await engine_server.post("/continue_generation")
    assert (answer.status, answer.body) == (200, CONTINUED)
    assert (await call).status == 200
    assert (await engine_server.get("/health")).status == 200


async def test_pause_needs_a_known_mode_and_continue_needs_no_pause(engine_server: RunningEngine):
    assert (await engine_server.post("/pause_generation", {"mode": "nap"})).status == 400
    answer = await engine_server.post("/continue_generation")
    assert (answer.status, answer.body) == (200, CONTINUED)


async def test_pause_with_abort_gives_partial_output(engine_server: RunningEngine):
    async with engine_server.stream(LONG) as running:
        await running.tokens(2)
        await engine_server.post("/pause_generation", {})
        last = await running.last()
        flushed = await engine_server.post("/flush_cache")
    assert last["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert 2 <= len(last["output_ids"]) < CONTEXT - 8
    assert flushed.status == 200
    assert flushed.body.startswith("Cache flushed.\n")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_flush_is_refused_while_paused_requests_are_kept(
    engine_server: RunningEngine, mode: str
):
    async with engine_server.stream(LONG) as running:
        await running.tokens(1)
        await engine_server.post("/pause_generation", {"mode": mode})
        answer = await engine_server.post("/flush_cache")
        if engine_server.kind == "sglang" and mode == "retract" and engine_server.tells_spans:
            assert answer.status == 200  # they hold no KV any more; an older one refuses
        else:
            assert (answer.status, answer.body) == (400, "Flush cache failed.\n")


async def test_flush_is_refused_while_requests_run(engine_server: RunningEngine):
    async with engine_server.stream(LONG) as running:
        await running.tokens(1)
        answer = await engine_server.post("/flush_cache")
        assert (answer.status, answer.body) == (400, "Flush cache failed.\n")


async def test_in_place_keeps_kv_and_tells_both_policies(
    engine_server: RunningEngine, models: Models
):
    last, swaps = await _swapped_under_a_request(engine_server, models, "in_place")

    assert last["meta_info"]["num_retractions"] == 0
    old, new, output = models.models["a"], models.models["b"], last["output_ids"]
    found = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    before = reference_logprobs(old, [1, 2, 3], output)
    assert any(
        agree(found[:swap], before[:swap])
        and agree(found[swap:], reference_after_swap(old, new, [1, 2, 3], output, swap))
        for swap in swaps
    )


async def test_retraction_reads_everything_again_with_the_new_policy(
    engine_server: RunningEngine, models: Models
):
    last, swaps = await _swapped_under_a_request(engine_server, models, "retract")

    assert last["meta_info"]["num_retractions"] == 1
    output = last["output_ids"]
    found = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    before = reference_logprobs(models.models["a"], [1, 2, 3], output)
    after = reference_logprobs(models.models["b"], [1, 2, 3], output)
    assert any(
        agree(found[:swap], before[:swap]) and agree(found[swap:], after[swap:]) for swap in swaps
    )


async def _swapped_under_a_request(
    engine: RunningEngine, models: Models, mode: str
) -> tuple[Any, range]:
    """A response that began under ``v1`` = a and went on under ``v2`` = b, and where that may be.

    An engine without spans leaves what the stream showed: some tokens before, some after.
    """
    await engine.post("/update_weight_version", {"new_version": "v1"})
    async with engine.stream({**LONG, "rid": "r"}) as running:
        old = await running.tokens(5)
        await engine.post("/pause_generation", {"mode": mode})
        swapped = await swap_from_disk(engine, folder(models, "b"), "v2", flush_cache=False)
        assert swapped.status == 200
        await engine.post("/continue_generation")
        while (event := await running.next())["meta_info"]["weight_version"] != "v2":
            old = event
        if len(event["output_ids"]) < 12:
            event = await running.tokens(12)
        seen = range(len(old["output_ids"]), len(event["output_ids"]) + 1)
        # One more after v2 was first told, so that tokens of v2 are surely there.
        await running.tokens(len(event["output_ids"]) + 2)
        await engine.post("/abort_request", {"rid": "r"})
        last = await running.last()
    if not engine.tells_spans:
        assert "weight_versions" not in last["meta_info"]
        return last, seen
    spans = last["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == ["v1", "v2"]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"] >= 5
    assert spans[1]["end"] == len(last["output_ids"])
    return last, range(spans[1]["start"], spans[1]["start"] + 1)


async def test_a_cached_prefix_is_never_served_by_other_weights(
    engine_server: RunningEngine, models: Models
):
    """Neither with the same salt nor without a flush."""
    body = generate(return_logprob=True, extra_key="same")
    await engine_server.post("/generate", body)
    cached = await engine_server.post("/generate", body)
    assert cached.body["meta_info"]["cached_tokens"] == 2
    await swap_from_disk(engine_server, folder(models, "b"), "v1", flush_cache=False)
    fresh = await engine_server.post("/generate", body)

    assert fresh.body["meta_info"]["cached_tokens"] == 0
    found = torch.tensor([t[0] for t in fresh.body["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["b"], [1, 2, 3], fresh.body["output_ids"])
    assert_logprobs(found, expected)


async def test_salts_keep_prefixes_apart(engine_server: RunningEngine):
    for salt, cached in (("x", 0), ("x", 2), ("y", 0), (None, 0)):
        answer = await engine_server.post("/generate", generate(extra_key=salt))
        assert answer.body["meta_info"]["cached_tokens"] == cached


# Disk


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


# The bracket, tensors in the body


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


# Broadcast


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


async def test_greedy_is_the_same_before_and_after_a_round_trip(
    engine_server: RunningEngine, models: Models
):
    body = generate(sampling_params={**GREEDY, "max_new_tokens": 16})
    first = (await engine_server.post("/generate", body)).body["output_ids"]
    await swap_from_disk(engine_server, folder(models, "b"), "b")
    other = (await engine_server.post("/generate", body)).body["output_ids"]
    await swap_from_disk(engine_server, folder(models, "a"), "a")
    assert (await engine_server.post("/generate", body)).body["output_ids"] == first != other


# What only one engine can do


@only_on("sglang", "the embedded engine has no GPU memory to give back")
async def test_memory_is_given_back_under_a_pause_and_taken_again(
    engine_server: RunningEngine, models: Models
):
    async with HttpEngineClient(engine_server.url, api_key=engine_server.api_key) as client:
        await client.pause("abort")
        await client.release_memory()
        await client.resume_memory()
        await client.update_from_disk(folder(models, "b"), PolicyId(1, 1), flush=True)
        await client.resume()
    sample = (await engine_server.post("/generate", generate(return_logprob=True))).body
    assert sample["meta_info"]["weight_version"] == "e1.u1"
    found = torch.tensor([t[0] for t in sample["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["b"], [1, 2, 3], sample["output_ids"])
    assert_logprobs(found, expected)


async def test_a_request_that_waits_for_a_swap_finds_no_prefix_of_the_old_weights(
    start_engine: Callable[..., Any], models: Models
):
    """It brings the old policy's salt, under which its prompt was read by the old weights."""
    with start_engine(max_running_requests=1) as engine:
        body = generate(return_logprob=True, extra_key="e1.u0")
        await engine.post("/generate", body)
        assert (await engine.post("/generate", body)).body["meta_info"]["cached_tokens"] == 2
        async with engine.stream({**LONG, "rid": "long", "extra_key": "e1.u0"}) as running:
            await running.tokens(2)
            waiting = asyncio.ensure_future(engine.post("/generate", body))
            await engine.until(waiting=1, running=1)
            await engine.post("/pause_generation", {"mode": "in_place"})
            late = asyncio.ensure_future(engine.post("/generate", body))
            swapped = await swap_from_disk(engine, folder(models, "b"), "e1.u1", flush_cache=False)
            assert swapped.status == 200
            await engine.post("/continue_generation")
            await engine.post("/abort_request", {"rid": "long"})
            answers = [(await waiting).body, (await late).body]
    # The second of them may find what the first one read.
    assert answers[0]["meta_info"]["cached_tokens"] == 0
    for answer in answers:
        assert_version(engine, answer["meta_info"], "e1.u1", 4)
        found = torch.tensor([t[0] for t in answer["meta_info"]["output_token_logprobs"]])
        expected = reference_logprobs(models.models["b"], [1, 2, 3], answer["output_ids"])
        assert_logprobs(found, expected)
