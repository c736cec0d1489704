"""``POST /generate``: one call in, its samples out, whole or as events."""

from __future__ import annotations

import time
from typing import Any, cast

import orjson
from aiohttp import web

from runtime.engines.embedded.bodies import Call, parse_generate
from runtime.engines.embedded.engine import Engine, Ticket
from runtime.engines.embedded.envelopes import (
    bad_request,
    unavailable_error,
)
from runtime.engines.embedded.json_http import EngineKey, json_body, json_response
from runtime.engines.embedded.requests import ENGINE_STOPPED, QUEUE_FULL, Request, unavailable
from runtime.engines.embedded.scheduler import DuplicateRid, EngineStopped, Progress, QueueFull


async def generate(http: web.Request) -> web.StreamResponse:
    """Answer with one sample, an array of samples, or a stream of events."""
    engine = http.app[EngineKey]
    body = json_body(await http.read())
    call = parse_generate(body, engine.rules)
    _check_adapter(engine, body)
    received = time.time()
    try:
        ticket = engine.open(call)
    except DuplicateRid as error:
        raise bad_request(f"Duplicate request ID detected: {error}") from error
    except QueueFull as error:
        if not call.stream:
            raise unavailable_error(QUEUE_FULL) from error
        return await _refuse_in_stream(http, call, received)
    try:
        if call.stream:
            return await _stream(http, ticket, received)
        await ticket.wait()
        return _whole(engine, ticket, received)
    finally:
        engine.close(ticket)


def _check_adapter(engine: Engine, body: object) -> None:
    """Refuse a request for an adapter that is not the loaded one, which serves all requests."""
    named = cast(dict[str, Any], body).get("lora_path")
    for name in cast(list[object], named) if isinstance(named, list) else [named]:
        if name is not None and name != engine.adapter.name:
            raise bad_request(f"Got LoRA adapter that has never been loaded: {name!s:.80}")


def _whole(engine: Engine, ticket: Ticket, received: float) -> web.Response:
    samples: list[dict[str, Any]] = []
    for request in ticket.call.requests:
        finish = request.finish or {}
        if finish.get("message") == ENGINE_STOPPED:
            raise EngineStopped
        if finish.get("status_code"):
            # One refused sample fails the whole call, whatever its siblings brought.
            raise unavailable_error(str(finish["message"]))
        done = Progress(request, request.output, request.logprobs, request.finish)
        samples.append(_sample(engine, done, received))
    return json_response(samples if ticket.call.is_batch else samples[0])


async def _stream(http: web.Request, ticket: Ticket, received: float) -> web.StreamResponse:
    response = await _event_stream(http)
    index = {r.rid: i for i, r in enumerate(ticket.call.requests)}
    engine = http.app[EngineKey]
    while not (ticket.is_over and not ticket.newest):
        await ticket.wait()
        for report in ticket.take():
            event = _sample(engine, report, received)
            if ticket.call.is_batch:
                event["index"] = index[report.request.rid]
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _refuse_in_stream(http: web.Request, call: Call, received: float) -> web.StreamResponse:
    """A full queue under ``stream``: 200, and the refusal as the only event."""
    response = await _event_stream(http)
    engine = http.app[EngineKey]
    for i, request in enumerate(call.requests):
        request.finish, request.version = unavailable(QUEUE_FULL), engine.decoder.version
        event = _sample(engine, Progress(request, [], [], request.finish), received)
        if call.is_batch:
            event["index"] = i
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _event_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    return response


def _sample(engine: Engine, progress: Progress, received: float) -> dict[str, Any]:
    """The wire's form of one sample, finished or not."""
    request, tokens = progress.request, progress.tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": progress.finish,
        "prompt_tokens": len(request.prompt),
        "weight_version": request.version if progress.finish else engine.decoder.version,
        "num_retractions": request.num_retractions,
    }
    # As upstream: one that never ran has no log-probs at all.
    if request.wants_logprobs and (tokens or request.marks):
        meta |= _logprobs(request, tokens, progress.logprobs)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(tokens),
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": (
            {"device": request.cached_tokens, "host": 0} if request.cached_tokens else None
        ),
        "dp_rank": None,
        "e2e_latency": time.time() - received,
        "response_sent_to_client_ts": time.time(),
    }
    if progress.finish is not None:
        meta["weight_versions"] = request.spans()
    return {"text": _text(engine, progress), "output_ids": tokens, "meta_info": meta}


def _logprobs(request: Request, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    start = request.logprob_start
    given: list[list[float | int | None]] = []
    top: dict[str, Any] = {}
    if 0 <= start < len(request.prompt) and request.input_logprobs is not None:
        # As upstream: the first one has none, wherever it stands.
        scores = [None, *request.input_logprobs[start:]]
        given = [[p, t, None] for p, t in zip(scores, request.prompt[start:], strict=True)]
        if request.num_top:
            places = [
                [[p, t, None] for p, t in zip(values, ids, strict=True)]
                for values, ids in request.input_top
            ]
            top = {"input_top_logprobs": [None, *places]}
    return {
        **top,
        "input_token_logprobs": given,
        "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
        "output_token_logprobs_length": len(tokens),
    }


def _text(engine: Engine, progress: Progress) -> str:
    if engine.tokenizer is None:
        return ""
    finish = progress.finish or {}
    matched = finish.get("matched")
    text = engine.text(progress.tokens[:-1] if isinstance(matched, int) else progress.tokens)
    if isinstance(matched, str):
        text = text[: text.find(matched)]
    return text
