"""Full queues, limits of time, and requests that end early, the same for all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.engines.answers import classify
from runtime.errors import OverloadError
from tests.contracts.conftest import Models, RunningEngine
from tests.contracts.generating import GREEDY, LONG, generate
from tests.contracts.lane import assert_logprobs
from tests.contracts.tiny_models import CONTEXT, reference_logprobs

pytestmark = pytest.mark.anyio


QUEUE_FULL = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}


async def test_full_queue_refuses_with_503(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, max_queued_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            # SGLang answers nothing to a stream that waits: not even that it is one.
            waits = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "waits"}))
            await engine.until(waiting=1, running=1)
            refused = await engine.post("/generate", generate())
            pair = await engine.post("/generate", generate(sampling_params={**GREEDY, "n": 2}))
            async with engine.stream(generate()) as streamed:
                events = await streamed.rest()
            await engine.post("/abort_request", {"abort_all": True})
            await waits

    assert (refused.status, refused.body) == (503, QUEUE_FULL)
    assert (pair.status, pair.body) == (503, QUEUE_FULL)
    assert isinstance(classify(refused.status, refused.body), OverloadError)
    assert streamed.status == 200
    (event,) = events
    assert (event["text"], event["output_ids"]) == ("", [])
    reason = event["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert reason["message"] == "The request queue is full."


async def test_health_while_the_queue_is_full(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, max_queued_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            waits = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "waits"}))
            await engine.until(waiting=1, running=1)
            for path in ("/health", "/health_generate"):
                answer = await engine.get(path)
                assert (answer.status, answer.body) == (200, "")
            await engine.post("/abort_request", {"abort_all": True})
            await waits


async def test_more_samples_than_the_queue_holds_are_refused_whole(
    start_engine: Callable[..., Any],
):
    with start_engine(max_running_requests=4, max_queued_requests=1) as engine:
        answer = await engine.post("/generate", generate(sampling_params={**GREEDY, "n": 2}))
        assert (answer.status, answer.body) == (503, QUEUE_FULL)
        assert (await engine.post("/generate", generate())).status == 200


async def test_waiting_too_long_is_a_503(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, waiting_timeout_s=0.05) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            answer = await engine.post("/generate", generate())
    assert answer.status == 503
    assert answer.body == {**QUEUE_FULL, "message": "Request waiting timeout reached."}


async def test_running_too_long_is_a_503(start_engine: Callable[..., Any]):
    with start_engine(running_timeout_s=0.05) as engine:
        answer = await engine.post("/generate", {**LONG})
    assert answer.status == 503
    assert answer.body == {**QUEUE_FULL, "message": "Request running timeout reached."}


async def test_abort_of_a_running_request_gives_what_it_has(
    engine_server: RunningEngine, models: Models
):
    async with engine_server.stream({**LONG, "rid": "mine"}) as running:
        await running.tokens(3)
        answer = await engine_server.post("/abort_request", {"rid": "mine"})
        assert (answer.status, answer.body) == (200, "")
        last = await running.last()

    assert last["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    output = last["output_ids"]
    assert 3 <= len(output) < CONTEXT - 8
    found = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["a"], [1, 2, 3], output)
    assert_logprobs(found, expected)


async def test_abort_of_a_waiting_request_has_no_logprobs(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            waiting = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "w"}))
            await engine.until(waiting=1, running=1)
            await engine.post("/abort_request", {"rid": "w"})
            answer = await waiting

    assert answer.status == 200
    assert answer.body["output_ids"] == []
    meta = answer.body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert not meta.get("output_token_logprobs")


async def test_a_client_that_leaves_frees_its_place(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
        assert (await engine.post("/generate", generate())).status == 200


async def test_unknown_ids_and_prefixes_abort_nothing(engine_server: RunningEngine):
    async with engine_server.stream({**LONG, "rid": "abcdef"}) as running:
        first = await running.tokens(1)
        for rid in ("abc", "other", ""):
            assert (await engine_server.post("/abort_request", {"rid": rid})).status == 200
        await running.tokens(len(first["output_ids"]) + 2)


async def test_abort_all_ends_everything(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=2) as engine:
        calls = [asyncio.ensure_future(engine.post("/generate", LONG)) for _ in range(5)]
        await engine.until(waiting=3, running=2)
        await engine.post("/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*calls)
        kinds = sorted(a.body["meta_info"]["finish_reason"]["message"] for a in answers)
        assert kinds == ["Abort in waiting queue"] * 3 + ["Aborted"] * 2
        await engine.until(waiting=0, running=0)
