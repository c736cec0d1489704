"""Automatic values of a run file, settled once, each with its reason."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from configs.clusters import ATTENTION_BY_GENERATION, COMPATIBILITY_PATH, IMAGE_CUDA, ClusterProfile
from configs.run import RunSpec
from configs.topology import Topology

Transport = Literal["disk", "ipc", "broadcast", "p2p"]


class Settled(BaseModel):
    """One value the file left open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    value: str | int | float | bool
    reason: str


def settle_transport(spec: RunSpec) -> tuple[Transport, str]:
    """How weights travel. Depends on the run file alone, so that it never changes in a run."""
    chosen = spec.core.publication_transport
    if chosen != "auto":
        return chosen, "set"
    if spec.lora.publishes_adapter:
        return "disk", "an adapter travels as files"
    is_here = spec.launch.backend == "local"
    if spec.launch.gpus_per_replica == 0 and is_here:
        return "disk", "engines on CPU: files in memory (tmpfs) are as fast as it gets"
    if spec.core.publication_mode == "rolling":
        return "disk", "engine by engine: a collective serves all at once"
    if spec.rollout.colocated:
        return "ipc", "engine and trainer share a GPU: the engine reads the trainer's memory"
    return "broadcast", "one copy from trainer rank 0 to every engine"


def settle_attention(spec: RunSpec, profile: ClusterProfile | None) -> tuple[str, str]:
    """What the job's GPUs must be able to run; ``auto`` where only the job can see its GPU."""
    chosen = spec.core.attention_backend
    used = trainer_attention(spec, None if profile is None else profile.attention)
    if chosen != "auto":
        return chosen, f"set; {used}"
    if spec.launch.gpus_per_replica == 0:
        return "sdpa", f"no GPU; {used}"
    if profile is not None:
        return profile.attention, f"profile of {profile.name} ({profile.gpu}); {used}"
    by_gpu = ", ".join(f"{name} on {gen}" for gen, name in ATTENTION_BY_GENERATION.items())
    return "auto", f"no cluster profile; the preflight takes {by_gpu}; {used}"


def trainer_attention(spec: RunSpec, able: str | None) -> str:
    """What the trainer computes attention with, whatever its GPUs could run besides.

    Args:
        spec: the run.
        able: the backend that its GPUs are for; None where that is not known yet.
    """
    if spec.core.backend != "torch":
        return f"the {spec.core.backend} trainer uses it"
    own = "torch's own scaled_dot_product_attention"
    if not spec.launch.gpus_per_replica or spec.model.dtype != "bfloat16":
        return f"the torch trainer uses {own}"
    own += " and variable-length attention"
    chosen = spec.core.attention_backend
    if chosen in ("flash_3", "flash_4"):
        return "the torch trainer uses flash-attn-4"
    if chosen == "auto" and able in (None, "flash_3", "flash_4"):
        return f"the torch trainer uses flash-attn-4 where it is installed, otherwise {own}"
    return f"the torch trainer uses {own}"


def settle_environment(spec: RunSpec, profile: ClusterProfile | None) -> tuple[dict[str, str], str]:
    """What the job, not the submitter, gets because of its host; with the reason."""
    if profile is None or spec.launch.gpus_per_replica == 0 or spec.launch.backend == "local":
        return {}, "no GPU job on a known cluster"
    own = "LD_LIBRARY_PATH"
    if own in spec.launch.env or own in spec.launch.secrets:
        return {}, f"{own} is set by the run file"
    if not profile.needs_compatibility_path:
        return {}, f"{profile.name}'s driver is as new as the image's CUDA"
    reason = (
        f"{profile.name}'s driver has CUDA {profile.driver_cuda:g}, the image {IMAGE_CUDA:g}; it "
        "helps this pair start and proves nothing about another one"
    )
    return {own: COMPATIBILITY_PATH}, reason


def settle_mode(spec: RunSpec) -> str:
    """What the publication mode comes to."""
    if spec.core.publication_mode == "drain":
        return "responses finish, then weights are swapped and the cache is flushed"
    if spec.core.publication_mode == "rolling":
        return "engine by engine, each drained"
    return (
        "swap in place where the engine proves per-token spans at its start; otherwise abort and "
        "continue: prompt + partial response go on as a new request"
    )


def settle_rest(spec: RunSpec, topology: Topology, profile: ClusterProfile | None) -> list[Settled]:
    """Values that follow from one line each; only those the file leaves open."""
    core, launch, row = spec.core, spec.launch, spec.core.loss_row
    open_values: list[tuple[bool, str, str | int | float | bool | None, str]] = [
        (core.data is None, "core.data", topology.data, "what is left of the trainer's GPUs")
        if topology.trainer_gpus
        else (core.data is None, "core.data", topology.data, "one on CPU"),
        (core.tis is None, "core.tis", core.uses_tis, f"old_policy = {core.old_policy}"),
        (
            core.max_mean_logprob_gap is None,
            "core.max_mean_logprob_gap",
            core.mean_logprob_gap(spec.model.dtype),
            f"{spec.model.dtype}; a mean",
        ),
        (core.normalize_std is None, "core.normalize_std", row.normalize_std, core.loss),
        (core.loss_aggregation is None, "core.loss_aggregation", row.aggregation, core.loss),
        (core.eps_clip is None, "core.eps_clip", row.eps_clip, core.loss),
        (core.eps_clip_high is None, "core.eps_clip_high", row.eps_clip_high, core.loss),
        (launch.detached is None, "launch.detached", launch.is_detached, launch.backend),
    ]
    if profile is not None and launch.backend != "local":
        source = f"profile of {profile.name}"
        open_values += [
            (launch.workspace is None, "launch.workspace", profile.workspace, source),
            (launch.priority is None, "launch.priority", profile.priority, source),
        ]
    return [
        Settled(field=field, value=value, reason=reason)
        for is_open, field, value, reason in open_values
        if is_open and value is not None
    ]
