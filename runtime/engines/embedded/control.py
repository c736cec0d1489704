"""The control endpoints: health, pauses, weights, groups, and what the engine says about itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

from aiohttp import web
from torch import Tensor

from runtime.engines.collective import CollectiveGroup
from runtime.engines.embedded.engine import Engine
from runtime.engines.embedded.envelopes import bad_request, failed_update, invalid_body
from runtime.engines.embedded.generation import EngineKey, json_body, json_response
from runtime.engines.embedded.weights import WeightsRefused, dtype_named, read_body, read_folder
from runtime.engines.protocol import TensorSpec
from runtime.errors import UnavailableFeature

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
UPDATED_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)
VERSION = "milepost-embedded-1"
_MODES = ("abort", "retract", "in_place")


def routes() -> list[web.RouteDef]:
    """All routes but ``/generate``; the methods are upstream's."""
    any_method = [
        ("/flush_cache", flush_cache), ("/weights_checker", weights_checker),
    ]  # fmt: skip
    posts = [
        ("/abort_request", abort_request), ("/pause_generation", pause_generation),
        ("/continue_generation", continue_generation), ("/begin_weight_update", begin_update),
        ("/end_weight_update", end_update), ("/update_weights_from_disk", update_from_disk),
        ("/update_weights_from_tensor", update_from_tensor), ("/init_weights_update_group",
        init_group), ("/destroy_weights_update_group", destroy_group),
        ("/update_weights_from_distributed", update_from_distributed), ("/update_weight_version",
        update_weight_version),
    ]  # fmt: skip
    gets = [
        ("/health", health), ("/health_generate", health), ("/server_info", server_info),
        ("/get_server_info", server_info), ("/model_info", model_info),
        ("/get_model_info", model_info), ("/v1/loads", loads),
    ]  # fmt: skip
    return [
        *(web.get(path, handler) for path, handler in (*gets, *any_method)),
        *(web.post(path, handler) for path, handler in (*posts, *any_method)),
    ]


# Life and pauses


async def health(http: web.Request) -> web.Response:
    """200 when a token was generated; 503 while paused or when none comes. Bodies are empty."""
    engine = http.app[EngineKey]
    if engine.scheduler.paused is not None or not await engine.alive():
        return web.Response(status=503)
    return web.Response()


async def abort_request(http: web.Request) -> web.Response:
    """End one call or all; 200 with an empty body, also for an unknown id."""
    engine, body = http.app[EngineKey], await _fields(http)
    if body.get("abort_all"):
        await engine.between_steps(engine.scheduler.abort_all)
    elif rids := engine.rids_named(str(body.get("rid", ""))):
        await engine.between_steps(partial(engine.scheduler.abort, rids))
    return web.Response()


async def pause_generation(http: web.Request) -> web.Response:
    """Stop decoding; answered when it has stopped."""
    engine, body = http.app[EngineKey], await _fields(http)
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


# Weights


async def begin_update(http: web.Request) -> web.Response:
    """Open a weight-update session."""
    engine = http.app[EngineKey]
    if engine.session_open:
        raise failed_update(
            "a weight-update session is already open; call end_weight_update() first"
        )
    engine.session_open = True
    return json_response({"success": True, "message": "Success"})


async def end_update(http: web.Request) -> web.Response:
    """Close it."""
    engine = http.app[EngineKey]
    if not engine.session_open:
        raise failed_update("no weight-update session is open; call begin_weight_update() first")
    engine.session_open = False
    return json_response({"success": True, "message": "Success"})


async def update_from_disk(http: web.Request) -> web.Response:
    """Load all weights from a safetensors folder; a folder that does not fit changes nothing."""
    engine, body = http.app[EngineKey], await _fields(http)
    path = _text(body, "model_path")

    def read() -> dict[str, Tensor]:
        update = read_folder(path)
        engine.weights.check(update, whole=True)
        return update

    try:
        update = await engine.in_thread(read)
    except WeightsRefused as error:
        refusal = failed_update(f"Failed to get weights iterator: {error}.")
        refusal.body = {**refusal.body, "num_paused_requests": 0}
        raise refusal from error
    message = await _apply(engine, update, body, "Succeeded to update model weights.")
    engine.model_path = path
    return json_response({"success": True, "message": message, "num_paused_requests": 0})


async def update_from_tensor(http: web.Request) -> web.Response:
    """Load some weights from the body: base64 of safetensors bytes, never a pickle."""
    engine, body = http.app[EngineKey], await _fields(http)
    _require_session(engine, "update_weights_from_tensor")
    if body.get("load_format") not in (None, "safetensors"):
        raise failed_update(
            f"load_format {body['load_format']!r:.80} is not supported: this engine reads "
            "safetensors only"
        )

    def read() -> dict[str, Tensor]:
        update = read_body(body.get("serialized_named_tensors"))
        engine.weights.check(update, whole=False)
        return update

    try:
        update = await engine.in_thread(read)
    except WeightsRefused as error:
        raise failed_update(str(error)) from error
    return json_response(
        {"success": True, "message": await _apply(engine, update, body, "Success")}
    )


async def init_group(http: web.Request) -> web.Response:
    """Join a broadcast group; answered when all ranks have joined."""
    engine, body = http.app[EngineKey], await _fields(http)
    name = _text(body, "group_name", "weight_update_group")
    if name in engine.groups:
        raise failed_update(f"a group called {name!r} exists; destroy it first")
    join = partial(
        CollectiveGroup,
        host=_text(body, "master_address"),
        port=_integer(body, "master_port"),
        rank=_integer(body, "rank_offset"),
        world_size=_integer(body, "world_size"),
        name=name,
        backend=_text(body, "backend", "nccl"),
        timeout_s=engine.settings.collective_timeout_s,
    )
    try:
        engine.groups[name] = await engine.in_thread(join)
    except (RuntimeError, ValueError, UnavailableFeature) as error:
        raise failed_update(f"Failed to initialize custom process group: {error}.") from error
    return json_response(
        {"success": True, "message": "Succeeded to initialize custom process group."}
    )


async def destroy_group(http: web.Request) -> web.Response:
    """Leave a group; a broadcast that is waited for ends with an error."""
    engine, body = http.app[EngineKey], await _fields(http)
    group = engine.groups.pop(_text(body, "group_name", "weight_update_group"), None)
    if group is None:
        raise failed_update("The group to be destroyed does not exist.")
    group.close()
    return json_response({"success": True, "message": "Succeeded to destroy custom process group."})


async def update_from_distributed(http: web.Request) -> web.Response:
    """Receive one bucket by broadcast; an announcement that does not fit is refused at once."""
    engine, body = http.app[EngineKey], await _fields(http)
    _require_session(engine, "update_weights_from_distributed")
    group = engine.groups.get(_text(body, "group_name", "weight_update_group"))
    if group is None:
        raise failed_update("Failed to update parameter online: the group does not exist.")
    if body.get("load_format") is not None:
        raise failed_update(f"load_format {body['load_format']!r:.80} is not supported")
    specs = _specs(body)
    try:
        engine.weights.check_specs(specs)
        layout = [(spec.shape, dtype_named(spec.dtype)) for spec in specs]
        tensors = await engine.in_thread(lambda: group.receive(layout))
    except (WeightsRefused, RuntimeError) as error:
        raise failed_update(f"Failed to update parameter online: {error}.") from error
    update = dict(zip((spec.name for spec in specs), tensors, strict=True))
    message = await _apply(engine, update, body, "Succeeded to update parameter online.")
    return json_response({"success": True, "message": message})


async def update_weight_version(http: web.Request) -> web.Response:
    """Rename the weights that are served."""
    engine, body = http.app[EngineKey], await _fields(http)
    version = _text(body, "new_version")
    if body.get("abort_all_requests", True):
        await engine.between_steps(engine.scheduler.abort_all)
    await engine.between_steps(partial(engine.decoder.rename, version))
    return json_response(
        {
            "success": True,
            "message": f"Weight version updated to {version}",
            "new_version": version,
        }
    )


async def weights_checker(http: web.Request) -> web.Response:
    """Checksums of all weights; other actions are refused."""
    engine, body = http.app[EngineKey], await _fields(http)
    action = body.get("action", "checksum")
    if action != "checksum":
        raise failed_update(f"action {action!r:.80} is not supported")
    sums = await engine.between_steps(engine.weights.checksums)
    whole = hashlib.sha256("".join(f"{n}{s}" for n, s in sorted(sums.items())).encode()).hexdigest()
    rank = {"checksums": sums, "per_gpu_checksum": whole}
    return json_response(
        {
            "success": True,
            "message": "Success",
            "ranks": [rank],
            "per_engine_checksum": hashlib.sha256(whole.encode()).hexdigest(),
        }
    )


async def _apply(
    engine: Engine, update: dict[str, Tensor], body: Mapping[str, Any], said: str
) -> str:
    """Copy checked weights in between two steps; returns the message of the answer."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise bad_request(f"weight_version must be a text, got {version!r:.80}.")

    def swap() -> bool:
        if body.get("abort_all_requests"):
            engine.scheduler.abort_all()
        engine.weights.copy(update)
        # Read prompts belong to the old weights, whether or not a flush was asked for.
        engine.decoder.prefixes.clear()
        if version is not None:
            engine.decoder.rename(version)
        return not body.get("flush_cache", True) or engine.scheduler.is_idle()

    if not await engine.between_steps(swap):
        raise failed_update(UPDATED_NOT_FLUSHED)
    return said if version is None else f"{said} Weight version updated to {version}."


def _require_session(engine: Engine, call: str) -> None:
    if not engine.session_open:
        raise failed_update(
            f"{call} must run between begin_weight_update() and end_weight_update()"
        )


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


# Bodies


async def _fields(http: web.Request) -> dict[str, Any]:
    body = json_body(await http.read())
    if not isinstance(body, dict):
        raise invalid_body("dict_type", ("body",), "Input should be a valid dictionary")
    return cast(dict[str, Any], body)


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise invalid_body("string_type", ("body", name), "Input should be a valid string")
    return value


def _integer(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise invalid_body("int_type", ("body", name), "Input should be a valid integer")
    return value


def _specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    names, dtypes, shapes = (body.get(k) for k in ("names", "dtypes", "shapes"))
    lists = [names, dtypes, shapes]
    is_list: Callable[[object], bool] = lambda x: isinstance(x, list)  # noqa: E731
    if not all(map(is_list, lists)) or len({len(x) for x in lists if x is not None}) != 1:
        raise failed_update("names, dtypes and shapes must be lists of one length")
    specs: list[TensorSpec] = []
    for name, dtype, shape in zip(*cast(list[list[Any]], lists), strict=True):
        if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
            raise failed_update("each weight needs a name, a dtype and a shape")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(cast(list[int], shape))))
    return specs
