"""Parallel sizes, GPUs, attention and publication: arithmetic that has to come out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs.clusters import find_profile
from configs.engine_args import has_flag, owned_because
from configs.rules.finding import Finding, refused
from configs.rules.inputs import Rule
from configs.run import RunSpec
from configs.shape import ModelShape
from configs.topology import judge_gpus, model_parallel, trainer_gpus


def _trainer_gpus(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    launch, core, rollout = spec.launch, spec.core, spec.rollout
    total = launch.replicas * launch.gpus_per_replica
    if total == 0:
        return
    share, parallel = trainer_gpus(spec), model_parallel(spec)
    engines = 0 if rollout.colocated else rollout.engines * rollout.tensor
    sum_text = (
        f"{launch.replicas} x {launch.gpus_per_replica} GPUs - {engines} of engines "
        f"- {judge_gpus(spec)} of judges = {share} for the trainer"
    )
    sizes = f"tensor {core.tensor} x pipeline {core.pipeline} x context {core.context}"
    fields = ("core.data", "core.tensor", "core.pipeline", "core.context", "rollout.engines")
    fields += ("rollout.tensor", "rollout.colocated", "launch.gpus_per_replica")
    fields += ("launch.replicas", "reward.judge")
    if share < 1:
        yield refused(*fields[4:], because=sum_text, allowed="more GPUs, or fewer engines")
    elif core.data is not None and core.data * parallel != share:
        yield refused(
            *fields,
            because=f"{sum_text}; data {core.data} x {sizes} = {core.data * parallel}",
            allowed=f"sizes whose product is {share}; leave data out to have it derived",
        )
    elif share % parallel:
        yield refused(
            *fields[1:],
            because=f"{sum_text}, not a multiple of {sizes} = {parallel}",
            allowed=f"sizes whose product divides {share}",
        )
    if rollout.colocated and rollout.engines * rollout.tensor > share > 0:
        yield refused(
            "rollout.engines",
            "rollout.tensor",
            "rollout.colocated",
            because=f"{rollout.engines} engines x {rollout.tensor} GPUs share {share} GPUs",
        )


def _backend(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core = spec.core
    for size in ("tensor", "pipeline", "expert"):
        if core.backend == "torch" and getattr(core, size) > 1:
            yield refused(
                f"core.{size}",
                "core.backend",
                because="the torch backend divides data and context only",
                allowed=f'core.backend = "megatron", or {size} = 1',
            )
    if core.backend == "megatron" and spec.launch.gpus_per_replica == 0:
        yield refused(
            "core.backend",
            "launch.gpus_per_replica",
            because="the megatron backend needs GPUs",
            allowed='core.backend = "torch"',
        )
    ranks = (core.data or 1) * core.tensor * core.context
    if core.data is not None and ranks % core.expert:
        yield refused(
            "core.expert",
            "core.data",
            because=f"data {core.data} x tensor {core.tensor} x context {core.context} = {ranks} "
            f"ranks do not divide into expert {core.expert}",
            allowed=f"core.expert a divisor of {ranks}",
        )


def _model_sizes(spec: RunSpec, shape: ModelShape | None) -> Iterator[Finding]:
    if shape is None:
        return
    core, rollout = spec.core, spec.rollout
    for field, size, name, count in (
        ("core.tensor", core.tensor, "heads", shape.heads),
        ("rollout.tensor", rollout.tensor, "heads", shape.heads),
        ("core.pipeline", core.pipeline, "layers", shape.layers),
    ):
        if count % size:
            yield refused(
                field,
                "model.path",
                because=f"{size} does not divide the model's {count} {name}",
                allowed=f"a divisor of {count}",
            )
    if core.backend == "torch" and (shape.heads % core.context or shape.kv_heads % core.context):
        yield refused(
            "core.context",
            "model.path",
            because=f"{core.context} does not divide the model's {shape.heads} heads and "
            f"{shape.kv_heads} key/value heads: ranks that share a row have some heads each",
            allowed=f"a divisor of {math.gcd(shape.heads, shape.kv_heads)}",
        )
    if shape.is_moe and shape.experts % core.expert:
        yield refused(
            "core.expert",
            "model.path",
            because=f"{core.expert} does not divide the model's {shape.experts} experts",
            allowed=f"a divisor of {shape.experts}",
        )
    if shape.is_moe:
        return
    dense = {
        "core.routing_replay": core.routing_replay,
        "core.packing": core.packing == "expert_aware",
        "core.expert": core.expert > 1,
        "core.router_aux_coef": core.router_aux_coef > 0,
    }
    for field in (name for name, is_set in dense.items() if is_set):
        yield refused(field, because="the model is dense: it has no experts to route to")


def _tokens(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    room = spec.core.max_tokens_per_gpu * spec.core.context
    if longest > room:
        smallest = -(-longest // spec.core.context)
        yield refused(
            "core.max_tokens_per_gpu",
            "data.max_prompt_tokens",
            "rollout.max_response_tokens",
            "core.context",
            because=f"a prompt of {spec.data.max_prompt_tokens} and a response of "
            f"{spec.rollout.max_response_tokens} tokens do not fit {room}",
            allowed=f"core.max_tokens_per_gpu = {smallest} is the smallest that works",
        )


def _attention(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    wanted = spec.core.attention_backend
    if wanted.startswith("flash") and spec.launch.gpus_per_replica == 0:
        yield refused(
            "core.attention_backend",
            "launch.gpus_per_replica",
            because=f"{wanted} needs a GPU",
            allowed='"sdpa" or "auto"',
        )
    is_half = spec.model.dtype == "bfloat16"
    if wanted in ("flash_3", "flash_4") and spec.core.backend == "torch" and not is_half:
        yield refused(
            "core.attention_backend",
            "model.dtype",
            because=f"{wanted} of the torch trainer is for bfloat16, not {spec.model.dtype}",
            allowed='model.dtype = "bfloat16", or "sdpa" or "auto"',
        )
    profile = find_profile(spec.launch.cluster)
    made_for = {"flash_4": "blackwell", "flash_3": "hopper"}.get(wanted)
    if made_for is not None and profile is not None and profile.generation != made_for:
        yield refused(
            "core.attention_backend",
            "launch.cluster",
            because=f"{wanted} runs on {made_for.capitalize()} only; {profile.name} has "
            f"{profile.gpu}",
            allowed=f'"{profile.attention}" or "auto"',
        )


def _engine_args(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    rollout = spec.rollout
    for name in rollout.engine_args:
        because = owned_because(rollout.engine, name)
        if because is not None:
            yield refused(
                f"rollout.engine_args.{name}",
                "rollout.engine",
                because=f"the {rollout.engine} engine's {name} cannot be set here: {because}",
                allowed="leave it out",
            )


def _sharing(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    rollout = spec.rollout
    shares = rollout.colocated and spec.launch.gpus_per_replica > 0
    if shares and rollout.engine == "sglang":
        if not has_flag(rollout.engine_args, "mem-fraction-static"):
            yield refused(
                "rollout.colocated",
                "rollout.engine_args",
                because="an engine left to itself takes nearly all memory of the GPU it shares",
                allowed="rollout.engine_args.mem_fraction_static, its part of the whole: 0.3 or so",
            )
        if rollout.tensor > 1:
            yield refused(
                "rollout.tensor",
                "rollout.colocated",
                because="an engine that shares its GPU has only one",
                allowed="tensor = 1 and more engines, or GPUs of their own",
            )
    if rollout.sleep and not (shares and rollout.engine == "sglang"):
        yield refused(
            "rollout.sleep",
            "rollout.colocated",
            "rollout.engine",
            because="only a SGLang engine that shares the trainer's GPU has memory to give back",
            allowed="leave it out",
        )


def _publication(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    core, rollout = spec.core, spec.rollout
    transport, on_gpus = core.publication_transport, spec.launch.gpus_per_replica > 0
    if core.publication_mode == "rolling" and transport == "broadcast":
        yield refused(
            "core.publication_mode",
            "core.publication_transport",
            because="a collective serves all engines at once, never one by one",
            allowed='transport "auto", "disk" or "ipc"',
        )
    if transport == "ipc" and on_gpus and not (rollout.colocated and rollout.tensor == 1):
        yield refused(
            "core.publication_transport",
            "rollout.colocated",
            "rollout.tensor",
            because="an engine opens memory of the GPU it runs on, and no other",
            allowed='rollout.colocated = true with tensor = 1; otherwise "broadcast" or "disk"',
        )
    if transport == "ipc" and not on_gpus and rollout.engine == "sglang":
        yield refused(
            "core.publication_transport",
            "rollout.engine",
            because="SGLang shares memory on a GPU only",
            allowed='"auto", "disk" or "broadcast"',
        )
    if transport == "ipc" and spec.launch.replicas > 1:
        yield refused(
            "core.publication_transport",
            "launch.replicas",
            because="memory is shared within one machine",
            allowed='"broadcast", or "disk" on a shared file system',
        )
    if rollout.colocated and on_gpus and transport == "broadcast":
        yield refused(
            "core.publication_transport",
            "rollout.colocated",
            because="two ranks of one collective cannot share a GPU",
            allowed='"ipc" or "disk"',
        )


def _engines(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    rollout = spec.rollout
    if rollout.engine != "embedded":
        return
    if rollout.tensor > 1:
        yield refused(
            "rollout.tensor",
            "rollout.engine",
            because="the embedded engine runs on one device",
            allowed='rollout.engine = "sglang", or tensor = 1',
        )
    if spec.core.publication_transport == "p2p":
        yield refused(
            "core.publication_transport",
            "rollout.engine",
            because="the embedded engine takes no p2p writes",
            allowed='"auto", "disk", "ipc" or "broadcast"',
        )
    if rollout.engine_python is not None:
        yield refused(
            "rollout.engine_python",
            "rollout.engine",
            because="the embedded engine runs in the run's own environment",
            allowed="leave it out",
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    _trainer_gpus,
    _backend,
    _model_sizes,
    _tokens,
    _attention,
    _engine_args,
    _sharing,
    _publication,
    _engines,
)
