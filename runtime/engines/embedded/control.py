"""The control endpoints: health, aborts, pauses, and what the engine says about itself."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from runtime.engines.embedded.engine import Engine
from runtime.engines.embedded.envelopes import invalid_body
from runtime.engines.embedded.json_http import EngineKey, json_fields, json_response

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
VERSION = "milepost-embedded-1"
_MODES = ("abort", "retract", "in_place")


def routes() -> list[web.RouteDef]:
    """Health, pauses and facts; the methods are upstream's."""
    gets = [
        ("/health", health),
        ("/health_generate", health),
        ("/server_info", server_info),
        ("/get_server_info", server_info),
        ("/model_info", model_info),
        ("/get_model_info", model_info),
        ("/v1/loads", loads),
        ("/milepost", milepost),
        ("/flush_cache", flush_cache),
    ]
    posts = [
        ("/abort_request", abort_request),
        ("/pause_generation", pause_generation),
        ("/continue_generation", continue_generation),
        ("/flush_cache", flush_cache),
    ]
    return [*(web.get(*route) for route in gets), *(web.post(*route) for route in posts)]


# Life and pauses


async def health(http: web.Request) -> web.Response:
    """200 when a token was generated; 503 while paused or when none comes. Bodies are empty."""
    engine = http.app[EngineKey]
    if engine.scheduler.paused is not None or not await engine.alive():
        return web.Response(status=503)
    return web.Response()


async def abort_request(http: web.Request) -> web.Response:
    """End one call or all; 200 with an empty body, also for an unknown id."""
    engine, body = http.app[EngineKey], await json_fields(http)
    if body.get("abort_all"):
        await engine.between_steps(engine.scheduler.abort_all)
    elif rids := engine.rids_named(str(body.get("rid", ""))):
        await engine.between_steps(partial(engine.scheduler.abort, rids))
    return web.Response()


async def pause_generation(http: web.Request) -> web.Response:
    """Stop decoding; answered when it has stopped."""
    engine, body = http.app[EngineKey], await json_fields(http)
    mode = body.get("mode", "abort")
    if mode not in _MODES:
        raise invalid_body("literal_error", ("body", "mode"), f"Input should be one of {_MODES}")
    await engine.between_steps(partial(engine.scheduler.pause, mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(http: web.Request) -> web.Response:
    """Go on; no error when not paused."""
    engine = http.app[EngineKey]
    await engine.between_steps(engine.scheduler.resume)
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(http: web.Request) -> web.Response:
    """Forget read prompts; 400 while requests run or wait."""
    engine = http.app[EngineKey]
    flushed = await engine.between_steps(partial(_flush, engine))
    return web.Response(text=FLUSHED if flushed else NOT_FLUSHED, status=200 if flushed else 400)


def _flush(engine: Engine) -> bool:
    if not engine.scheduler.is_idle():
        return False
    engine.decoder.prefixes.clear()
    return True


# What it says about itself


async def server_info(http: web.Request) -> web.Response:
    """Settings and state. ``vocab_size`` and ``paused`` are ours, upstream has neither."""
    engine = http.app[EngineKey]
    settings, decoder = engine.settings, engine.decoder
    return json_response(
        {
            **settings.model_dump(exclude={"api_key"}),
            "model_path": engine.model_path,
            "context_length": engine.rules.context_length,
            "max_total_num_tokens": decoder.max_total_tokens,
            "max_req_input_len": engine.rules.context_length - 1,
            "vocab_size": engine.rules.vocab_size,
            "enable_return_routed_experts": False,
            "status": "ready",
            "version": VERSION,
            "started_at": engine.started_at,
            "internal_states": [
                {
                    "weight_version": decoder.version,
                    "adapter": engine.adapter.name,
                    "paused": engine.scheduler.paused,
                    "fused_decode": decoder.is_fused,
                    "weight_update_session": engine.session_open,
                }
            ],
        }
    )


async def model_info(http: web.Request) -> web.Response:
    """The model and the version of its weights."""
    engine = http.app[EngineKey]
    config = engine.model.config
    return json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.settings.model_path,
            "tokenizer_path": engine.settings.model_path if engine.tokenizer else None,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.decoder.version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }
    )


async def milepost(http: web.Request) -> web.Response:
    """What upstream does not tell and every engine of ours does."""
    engine = http.app[EngineKey]
    return json_response(
        {
            "contract": 1,
            "vocab_size": engine.rules.vocab_size,
            "context_length": engine.rules.context_length,
            "shares": "memory",
            "keepalive_s": engine.settings.keepalive_s,
            "takes_adapters": True,
        }
    )


async def loads(http: web.Request) -> web.Response:
    """Running and waiting requests. ``num_generated_tokens`` is ours."""
    engine = http.app[EngineKey]
    decoder = engine.decoder
    running, waiting = decoder.num_running, engine.scheduler.num_waiting
    used = round(decoder.used_share() * decoder.max_total_tokens)
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": decoder.max_total_tokens,
        "token_usage": decoder.used_share(),
        "max_running_requests": engine.settings.max_running_requests,
        "num_generated_tokens": decoder.generated_tokens,
    }
    aggregate = {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "avg_token_usage": decoder.used_share(),
    }
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": VERSION,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": aggregate,
        }
    )
