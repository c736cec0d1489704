"""The weight endpoints: five ways in, one swap between two steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from aiohttp import web
from torch import Tensor

from runtime.engines.collective import CollectiveGroup
from runtime.engines.embedded.engine import Engine
from runtime.engines.embedded.envelopes import bad_request, failed_adapter, failed_update
from runtime.engines.embedded.json_http import (
    EngineKey,
    integer_field,
    json_fields,
    json_response,
    text_field,
)
from runtime.engines.embedded.shared_memory import read_shared
from runtime.engines.embedded.weights import WeightsRefused, dtype_named, read_body, read_folder
from runtime.engines.protocol import TensorSpec
from runtime.errors import UnavailableFeature

UPDATED_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)

_FORMS = {"safetensors": read_body, "shared_memory": read_shared}


def routes() -> list[web.RouteDef]:
    """All weight endpoints; the methods are upstream's."""
    posts = [
        ("/begin_weight_update", begin_update),
        ("/end_weight_update", end_update),
        ("/update_weights_from_disk", update_from_disk),
        ("/update_weights_from_tensor", update_from_tensor),
        ("/init_weights_update_group", init_group),
        ("/destroy_weights_update_group", destroy_group),
        ("/update_weights_from_distributed", update_from_distributed),
        ("/load_lora_adapter", load_adapter),
        ("/unload_lora_adapter", unload_adapter),
        ("/update_weight_version", update_weight_version),
        ("/weights_checker", weights_checker),
    ]
    return [
        web.get("/weights_checker", weights_checker),
        *(web.post(*route) for route in posts),
    ]


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
    engine, body = http.app[EngineKey], await json_fields(http)
    _require_base(engine)
    path = text_field(body, "model_path")

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
    copy = partial(engine.weights.copy, update)
    message = await _apply(engine, copy, body, "Succeeded to update model weights.")
    engine.model_path = path
    return json_response({"success": True, "message": message, "num_paused_requests": 0})


async def update_from_tensor(http: web.Request) -> web.Response:
    """Load some weights: safetensors bytes in the body, or memory it names; never a pickle."""
    engine, body = http.app[EngineKey], await json_fields(http)
    _require_session(engine, "update_weights_from_tensor")
    _require_base(engine)
    load = _FORMS.get(body.get("load_format") or "safetensors")
    if load is None:
        raise failed_update(
            f"load_format {body['load_format']!r:.80} is not supported: this engine reads "
            "safetensors and shared memory only"
        )

    def read() -> dict[str, Tensor]:
        update = load(body.get("serialized_named_tensors"))
        engine.weights.check(update, whole=False)
        return update

    try:
        update = await engine.in_thread(read)
    except WeightsRefused as error:
        raise failed_update(str(error)) from error
    message = await _apply(engine, partial(engine.weights.copy, update), body, "Success")
    return json_response({"success": True, "message": message})


async def init_group(http: web.Request) -> web.Response:
    """Join a broadcast group; answered when all ranks have joined."""
    engine, body = http.app[EngineKey], await json_fields(http)
    name = text_field(body, "group_name", "weight_update_group")
    if name in engine.groups:
        raise failed_update(f"a group called {name!r} exists; destroy it first")
    join = partial(
        CollectiveGroup,
        host=text_field(body, "master_address"),
        port=integer_field(body, "master_port"),
        rank=integer_field(body, "rank_offset"),
        world_size=integer_field(body, "world_size"),
        name=name,
        backend=text_field(body, "backend", "nccl"),
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
    engine, body = http.app[EngineKey], await json_fields(http)
    group = engine.groups.pop(text_field(body, "group_name", "weight_update_group"), None)
    if group is None:
        raise failed_update("The group to be destroyed does not exist.")
    group.close()
    return json_response({"success": True, "message": "Succeeded to destroy custom process group."})


async def update_from_distributed(http: web.Request) -> web.Response:
    """Receive one bucket by broadcast; an announcement that does not fit is refused at once."""
    engine, body = http.app[EngineKey], await json_fields(http)
    _require_session(engine, "update_weights_from_distributed")
    _require_base(engine)
    group = engine.groups.get(text_field(body, "group_name", "weight_update_group"))
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
    copy = partial(engine.weights.copy, update)
    message = await _apply(engine, copy, body, "Succeeded to update parameter online.")
    return json_response({"success": True, "message": message})


async def load_adapter(http: web.Request) -> web.Response:
    """Serve the base with an adapter in peft's format; one that does not fit changes nothing.

    It takes the place of the adapter before, for all requests, and names the weights: tokens drawn
    from now on are those of ``weight_version``, or of ``lora_name`` where that is left out.
    """
    engine, body = http.app[EngineKey], await json_fields(http)
    name, path = text_field(body, "lora_name"), text_field(body, "lora_path")
    try:
        adapter = await engine.in_thread(partial(engine.adapter.read, path))
    except WeightsRefused as error:
        raise failed_adapter(f"Failed to load LoRA adapter {name}: {error}") from error
    load = partial(engine.adapter.load, name, adapter)
    message = await _apply(engine, load, {"weight_version": name, **body}, "Success")
    return _adapters(engine, message)


async def unload_adapter(http: web.Request) -> web.Response:
    """Serve the base alone, under the name it had at the start."""
    engine, body = http.app[EngineKey], await json_fields(http)
    name = text_field(body, "lora_name")
    if name != engine.adapter.name:
        raise failed_adapter(f"LoRA adapter {name} is not loaded")
    version = {"weight_version": engine.settings.weight_version}
    message = await _apply(engine, engine.adapter.unload, {**body, **version}, "Success")
    return _adapters(engine, message)


async def update_weight_version(http: web.Request) -> web.Response:
    """Rename the weights that are served."""
    engine, body = http.app[EngineKey], await json_fields(http)
    version = text_field(body, "new_version")
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
    engine, body = http.app[EngineKey], await json_fields(http)
    action = body.get("action", "checksum")
    if action != "checksum":
        raise failed_update(f"action {action!r:.80} is not supported")
    try:
        sums = await engine.between_steps(engine.adapter.checksums)
    except WeightsRefused as error:
        raise failed_update(str(error)) from error
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
    engine: Engine, change: Callable[[], None], body: Mapping[str, Any], said: str
) -> str:
    """Change checked weights between two steps; returns the message of the answer."""
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise bad_request(f"weight_version must be a text, got {version!r:.80}.")

    def swap() -> bool:
        if body.get("abort_all_requests"):
            engine.scheduler.abort_all()
        change()
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


def _require_base(engine: Engine) -> None:
    """Weights under an adapter are merged ones: new ones would go lost with the next adapter."""
    if engine.adapter.name is not None:
        raise failed_update(
            f"the adapter {engine.adapter.name} is loaded; unload it before weights are updated"
        )


def _adapters(engine: Engine, message: str) -> web.Response:
    name, path = engine.adapter.name, engine.adapter.path
    loaded = {} if name is None else {name: path}
    return json_response(
        {"success": True, "message": message, "error_message": None, "loaded_adapters": loaded}
    )


def _specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    lists = [body.get(name) for name in ("names", "dtypes", "shapes")]
    if not all(isinstance(x, list) for x in lists) or len({len(x or ()) for x in lists}) != 1:
        raise failed_update("names, dtypes and shapes must be lists of one length")
    specs: list[TensorSpec] = []
    for name, dtype, shape in zip(*cast(list[list[Any]], lists), strict=True):
        if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
            raise failed_update("each weight needs a name, a dtype and a shape")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(cast(list[int], shape))))
    return specs
