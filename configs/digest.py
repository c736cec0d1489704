"""Two digests of a run: what changes results, and how it is laid out.

`training_digest` must match on resume. `layout` may change where the backend can reshard, with a
notice. Every field of the run file is in exactly one of the tables below (a test holds that), so
that a new field cannot slip past the question which of them it belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from configs.run import RunSpec

WHOLE = ("*",)

TRAINING: Mapping[str, tuple[str, ...]] = {
    "": ("seed", "algorithm"),
    "model": WHOLE,
    "data": (
        "train",
        "recipe",
        "prompt_field",
        "answer_field",
        "verifier_field",
        "apply_chat_template",
        "max_prompt_tokens",
        "shuffle",
    ),
    "rollout": (
        "groups_per_collection",
        "samples_per_prompt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_response_tokens",
        "stop",
        "filter",
        "function",
    ),
    "async": ("max_staleness", "unused_groups"),
    "reward": (
        "verifier",
        "arguments",
        "batched",
        "overlong_buffer_tokens",
        "overlong_penalty",
    ),
    "core": (
        "loss",
        "normalize_std",
        "loss_aggregation",
        "eps_clip",
        "eps_clip_high",
        "dual_clip",
        "kl",
        "kl_coef",
        "kl_reward_coef",
        "reference",
        "entropy_coef",
        "old_policy",
        "tis",
        "tis_clip",
        "tis_clip_low",
        "tis_level",
        "tis_mode",
        "renormalize_support",
        "router_aux_coef",
        "routing_replay",
        "lr",
        "lr_schedule",
        "lr_decay_updates",
        "lr_decay_share",
        "lr_scale",
        "undecayed",
        "min_lr",
        "warmup_updates",
        "weight_decay",
        "optimizer",
        "momentum",
        "beta1",
        "beta2",
        "adam_eps",
        "max_grad_norm",
        "updates_per_collection",
    ),
    "lora": ("rank", "alpha", "dropout", "targets", "also"),
    "teacher": ("path", "coef", "top_k"),
}
"""What changes results. `core.max_updates` and `data.epochs` only say how long the run goes on."""

LAYOUT: Mapping[str, tuple[str, ...]] = {
    "rollout": (
        "engine",
        "engine_python",
        "engine_args",
        "engines",
        "tensor",
        "colocated",
        "sleep",
    ),
    "core": (
        "backend",
        "tensor",
        "pipeline",
        "context",
        "expert",
        "data",
        "attention_backend",
        "max_tokens_per_gpu",
        "packing",
        "activation_checkpointing",
        "compile",
        "publication_mode",
        "refresh_pause",
        "publication_transport",
    ),
    "lora": ("publish",),
    "teacher": ("url",),
    "launch": ("replicas", "gpus_per_replica"),
}
"""How the same training is spread over processes and devices."""

NEITHER: Mapping[str, tuple[str, ...]] = {
    "": ("name",),
    "data": ("epochs",),
    "rollout": (
        "max_running_requests",
        "filter_max_rounds",
        "waiting_deadline",
        "running_deadline",
        "drain_deadline",
        "engine_watchdog_timeout",
        "engine_start_deadline",
    ),
    "async": ("async_max_concurrent_samples", "buffer_collections"),
    "reward": ("url", "time_limit", "workers", "skip_budget", "code", "judge"),
    "core": (
        "distributed_timeout",
        "entropy_metric",
        "max_mean_logprob_gap",
        "policy_grad_norm_every",
        "max_skipped_steps",
        "p2p_transfer_timeout",
        "max_updates",
        "max_run_seconds",
        "debug_exit_after",
    ),
    "lora": ("export",),
    "teacher": ("token_env", "deadline", "concurrency"),
    "checkpoint": WHOLE,
    "evaluation": WHOLE,
    "output": WHOLE,
    "tracking": WHOLE,
    "launch": (
        "backend",
        "cluster",
        "workspace",
        "budget",
        "priority",
        "gpu_memory",
        "memory",
        "shared_memory",
        "min_runtime",
        "timeout",
        "synchronized_start_timeout",
        "auto_resume",
        "detached",
        "detach_grace",
        "env",
        "secrets",
        "weka_mounts",
        "image",
        "requires",
        "labels",
    ),
    "session": WHOLE,
    "health": WHOLE,
}
"""Deadlines, bounds, guards, addresses: they decide whether a run goes on, not what it learns."""


def training_digest(spec: RunSpec) -> str:
    """SHA-256, in hex, of what changes results."""
    return _digest(training_fields(spec))


def layout(spec: RunSpec) -> dict[str, Any]:
    """Parallel sizes, backends and engine counts, by dotted field."""
    return _pick(spec, LAYOUT)


def layout_digest(spec: RunSpec) -> str:
    """SHA-256, in hex, of the layout."""
    return _digest(layout(spec))


def spec_digest(spec: RunSpec) -> str:
    """SHA-256, in hex, of the whole run file as resolved."""
    return _digest(spec.model_dump(mode="json"))


def training_fields(spec: RunSpec) -> dict[str, Any]:
    """What changes results, by dotted field. The momentum and cells of the loss table are settled.

    A cell written out with the value it has anyway is the same training.
    """
    fields = _pick(spec, TRAINING)
    if spec.rollout.seed is None:
        # As before there was such a field: runs of then can be gone on with.
        del fields["rollout.seed"]
    if spec.core.optimizer == "adamw":
        del fields["core.optimizer"], fields["core.momentum"]  # likewise
    else:
        fields["core.momentum"] = spec.core.settled_momentum
    row = spec.core.loss_row
    fields["core.normalize_std"] = row.normalize_std
    fields["core.loss_aggregation"] = row.aggregation
    fields["core.eps_clip"] = row.eps_clip
    fields["core.eps_clip_high"] = row.eps_clip_high
    fields["core.tis"] = spec.core.uses_tis
    return fields


def training_differences(a: RunSpec, b: RunSpec) -> list[str]:
    """Dotted fields that make the training digests differ, in order; empty when equal."""
    return _differences(training_fields(a), training_fields(b))


def layout_differences(a: RunSpec, b: RunSpec) -> list[str]:
    """Dotted fields in which two layouts differ, in order."""
    return _differences(layout(a), layout(b))


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]


def _pick(spec: RunSpec, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    dump = spec.model_dump(mode="json")
    picked: dict[str, Any] = {}
    for section, names in table.items():
        values = cast("dict[str, Any] | None", dump if not section else dump[section])
        if values is None:
            continue
        prefix = f"{section}." if section else ""
        chosen = values.keys() if names == WHOLE else names
        picked |= {f"{prefix}{name}": values[name] for name in chosen}
    return picked


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
