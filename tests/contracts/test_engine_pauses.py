"""Pauses, and what a swap of the weights under them does to requests, on all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.engines.client import HttpEngineClient
from runtime.policy import PolicyId
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.generating import GREEDY, LONG, assert_version, generate
from tests.contracts.lane import agree, assert_logprobs
from tests.contracts.tiny_models import (
    CONTEXT,
    reference_after_swap,
    reference_logprobs,
)
from tests.contracts.weights import CONTINUED, PAUSED, folder, swap_from_disk

pytestmark = pytest.mark.anyio


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


async def test_greedy_is_the_same_before_and_after_a_round_trip(
    engine_server: RunningEngine, models: Models
):
    body = generate(sampling_params={**GREEDY, "max_new_tokens": 16})
    first = (await engine_server.post("/generate", body)).body["output_ids"]
    await swap_from_disk(engine_server, folder(models, "b"), "b")
    other = (await engine_server.post("/generate", body)).body["output_ids"]
    await swap_from_disk(engine_server, folder(models, "a"), "a")
    assert (await engine_server.post("/generate", body)).body["output_ids"] == first != other


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
