"""Which parts of the run file this version cannot execute yet.

`plan` and `validate` work on the whole run file and list these; running refuses them. A line leaves
this file in the commit that brings its machinery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from configs.run import RunSpec

_Gap = tuple[str, object, str]


def unavailable(spec: RunSpec) -> list[str]:
    """One line per field whose machinery is missing; empty when the run can start here."""
    gaps = [*_training(spec), *_serving(spec), *_around(spec)]
    return [
        f"not available yet: {name} = {json.dumps(value)} ({what})" for name, value, what in gaps
    ]


def _training(spec: RunSpec) -> Iterator[_Gap]:
    core = spec.core
    if core.backend == "megatron":
        yield "core.backend", core.backend, "the Megatron Core backend"
        if core.context > 1:
            yield "core.context", core.context, "context-parallel with this backend"
    for size in ("tensor", "pipeline", "expert"):
        if getattr(core, size) > 1:
            yield f"core.{size}", getattr(core, size), "parallelism other than data and context"
    if core.routing_replay:
        yield "core.routing_replay", True, "routing replay"
    if core.packing == "expert_aware":
        yield "core.packing", core.packing, "packing by expert load"
    if core.router_aux_coef > 0:
        yield "core.router_aux_coef", core.router_aux_coef, "router losses"
    if core.renormalize_support:
        yield "core.renormalize_support", True, "scoring over kept tokens only"


def _serving(spec: RunSpec) -> Iterator[_Gap]:
    core, rollout = spec.core, spec.rollout
    if rollout.function is not None:
        yield "rollout.function", rollout.function, "multi-turn rollout functions"
    if rollout.filter not in ("off", "equal_rewards"):
        yield "rollout.filter", rollout.filter, "filters by import path"
    if rollout.colocated and (rollout.engines > 1 or rollout.tensor > 1):
        yield "rollout.engines", rollout.engines, "several engines on the trainer's GPUs"
    if core.publication_transport == "p2p":
        yield "core.publication_transport", core.publication_transport, "this transport"
    services = {"code", "judge", "http", "instructions"}
    if spec.reward.verifier in services:
        yield "reward.verifier", spec.reward.verifier, "this verifier"
    if spec.reward.code is not None:
        yield "reward.code", spec.reward.code.url, "the code service"
    if spec.reward.judge is not None:
        yield "reward.judge", spec.reward.judge.url or "managed", "judges"


def _around(spec: RunSpec) -> Iterator[_Gap]:
    if spec.checkpoint.every_seconds is not None:
        yield "checkpoint.every_seconds", spec.checkpoint.every_seconds, "commits by time"
