"""The plan of a run: everything the run file implies, settled before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from configs.availability import unavailable
from configs.clusters import ClusterProfile, find_profile
from configs.concurrency import Concurrency, settle_concurrency
from configs.digest import layout_digest, spec_digest, training_digest
from configs.load import LoadedRun
from configs.memory import MemoryEstimate, estimate_memory, gib, memory_warnings
from configs.rules.launching import paths_of
from configs.run import RunSpec
from configs.schedule import Schedule, closing_warning, make_schedule
from configs.settle import (
    Settled,
    Transport,
    settle_attention,
    settle_environment,
    settle_mode,
    settle_rest,
    settle_transport,
)
from configs.topology import Topology, divide

NOT_CHECKED = [
    "mounts: whether they exist, and what is under them",
    "credentials and named secrets",
    "memory fit: workspaces, fragmentation and KV come on top of the estimate",
    "the runtime installed where the job runs",
    "the job's network",
]
_SLOWEST_TOKENS_PER_S = 10


class Batch(BaseModel):
    """Batch arithmetic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups_per_collection: int
    samples_per_prompt: int
    samples_per_collection: int
    samples_per_update: int
    updates_per_collection: int
    serving_slots: int
    staleness_bound_groups: int
    """Groups admitted and not yet consumed, those in training included, never exceed this."""
    expected_staleness: tuple[int, int]
    """Updates: where the trainer waits for generation, and where finished groups wait for it."""
    longest_sequence_tokens: int


class Plan(BaseModel):
    """A run, settled. Travels as `plan.json`; everything in it is JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    name: str
    run_file: Path
    sets: list[str]
    training_digest: str
    layout_digest: str
    spec_digest: str
    topology: Topology
    batch: Batch
    concurrency: int
    """Samples in flight."""
    publication_transport: Transport
    attention: str
    """`auto` where only the job can tell."""
    environment: dict[str, str]
    """What the job gets besides `launch.env` because of its host."""
    detached: bool
    settled: list[Settled]
    """Values the file left open, each with its reason."""
    schedule: Schedule
    memory: MemoryEstimate | None
    """None where the model's shape cannot be read from here."""
    paths: dict[str, Path]
    image: str | None
    warnings: list[str]
    not_available: list[str]
    """What this version cannot run yet."""
    not_checked: list[str]
    spec: dict[str, Any]
    """The resolved run file; `RunSpec.model_validate` reads it back."""


def make_plan(loaded: LoadedRun) -> Plan:
    """Settle a run file. Pure but for cluster profiles, which are files beside this module."""
    spec = loaded.spec
    profile = find_profile(spec.launch.cluster)
    topology = divide(spec)
    memory = estimate_memory(spec, loaded.shape, topology) if loaded.shape else None
    concurrency = settle_concurrency(spec)
    transport, transport_reason = settle_transport(spec)
    attention, attention_reason = settle_attention(spec, profile)
    environment, environment_reason = settle_environment(spec, profile)
    settled = [
        Settled(
            field="async.async_max_concurrent_samples",
            value=concurrency.samples,
            reason=concurrency.reason,
        ),
        Settled(field="core.publication_transport", value=transport, reason=transport_reason),
        Settled(
            field="core.publication_mode",
            value=spec.core.publication_mode,
            reason=settle_mode(spec),
        ),
        Settled(field="core.attention_backend", value=attention, reason=attention_reason),
        *settle_rest(spec, topology, profile),
    ]
    if environment:
        settled.append(
            Settled(
                field="LD_LIBRARY_PATH",
                value=environment["LD_LIBRARY_PATH"],
                reason=environment_reason,
            )
        )
    warnings = [
        *loaded.warnings,
        *concurrency.warnings,
        *_warnings(spec, topology, profile, memory),
    ]
    return Plan(
        name=spec.name,
        run_file=loaded.path,
        sets=list(loaded.sets),
        training_digest=training_digest(spec),
        layout_digest=layout_digest(spec),
        spec_digest=spec_digest(spec),
        topology=topology,
        batch=_batch(spec, concurrency),
        concurrency=concurrency.samples,
        publication_transport=transport,
        attention=attention,
        environment=environment,
        detached=spec.launch.is_detached,
        settled=settled,
        schedule=make_schedule(spec),
        memory=memory,
        paths=_paths(spec),
        image=spec.launch.image,
        warnings=warnings,
        not_available=unavailable(spec),
        not_checked=_not_checked(spec, memory),
        spec=spec.model_dump(mode="json"),
    )


def _batch(spec: RunSpec, concurrency: Concurrency) -> Batch:
    rollout, core = spec.rollout, spec.core
    samples = rollout.groups_per_collection * rollout.samples_per_prompt
    return Batch(
        groups_per_collection=rollout.groups_per_collection,
        samples_per_prompt=rollout.samples_per_prompt,
        samples_per_collection=samples,
        samples_per_update=samples // core.updates_per_collection,
        updates_per_collection=core.updates_per_collection,
        serving_slots=rollout.engines * rollout.max_running_requests,
        staleness_bound_groups=concurrency.bound_groups,
        expected_staleness=(concurrency.staleness_generating, concurrency.staleness_training),
        longest_sequence_tokens=spec.data.max_prompt_tokens + rollout.max_response_tokens,
    )


def _paths(spec: RunSpec) -> dict[str, Path]:
    root = spec.output.root
    made = {"plan": root / "plan.json", "prepared": root / "prepared"}
    if spec.output.export_hf:
        made["export"] = root / "export"
    return paths_of(spec) | made


def _warnings(
    spec: RunSpec,
    topology: Topology,
    profile: ClusterProfile | None,
    memory: MemoryEstimate | None,
) -> list[str]:
    warnings: list[str] = []
    closing = closing_warning(spec)
    if closing is not None:
        warnings.append(closing)
    gpu_memory = profile.gpu_memory if profile is not None else None
    sized_for = spec.launch.gpu_memory
    if profile is not None and sized_for is not None and sized_for != gpu_memory:
        warnings.append(
            f"the file is sized for GPUs of {gib(sized_for)}; {profile.name} has {profile.gpu} "
            f"with {gib(profile.gpu_memory)}"
        )
    if memory is not None:
        warnings += memory_warnings(spec, memory, gpu_memory, topology)
    if topology.idle_gpus:
        warnings.append(f"{topology.idle_gpus} GPUs are asked for and not used")
    drain = spec.rollout.drain_deadline
    if spec.rollout.max_response_tokens > drain * _SLOWEST_TOKENS_PER_S:
        warnings.append(
            f"responses of {spec.rollout.max_response_tokens} tokens can outlast "
            f"rollout.drain_deadline ({drain:g} s at {_SLOWEST_TOKENS_PER_S} tokens/s): they are "
            "requeued at a drain"
        )
    return warnings


def _not_checked(spec: RunSpec, memory: MemoryEstimate | None) -> list[str]:
    unread: list[str] = []
    if memory is None:
        unread = [f"model shape: {spec.model.path}/config.json cannot be read from here"]
    return [*unread, *NOT_CHECKED]
