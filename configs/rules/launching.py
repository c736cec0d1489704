"""What a scheduler, its mounts and its protection have to do with the rest of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from configs.clusters import find_profile, profile_names
from configs.problems import nearest_name
from configs.rules.finding import Finding, refused, warned
from configs.rules.inputs import Rule
from configs.run import RunSpec
from configs.shape import ModelShape

NODE_GPUS = 8
_ADDRESSED = ("ray", "kuberay")
"""Backends whose cluster is an address or a context, not one with a profile."""


def _replicas(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    launch = spec.launch
    if launch.replicas == 1:
        return
    if launch.backend == "local":
        yield refused(
            "launch.replicas",
            "launch.backend",
            because="a local run has one node",
            allowed='replicas = 1, or backend = "beaker", "kuberay" or "ray"',
        )
    if launch.gpus_per_replica not in (0, NODE_GPUS):
        yield refused(
            "launch.gpus_per_replica",
            "launch.replicas",
            because="several nodes are whole ones; no profile declares another tested placement",
            allowed=f"{NODE_GPUS}",
        )


def _cluster(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    launch = spec.launch
    profile = find_profile(launch.cluster)
    if launch.backend == "beaker" and launch.cluster is None:
        yield refused("launch.cluster", "launch.backend", because="a Beaker job names its cluster")
    if launch.backend == "beaker" and launch.workspace is None and profile is None:
        yield refused(
            "launch.workspace", "launch.backend", because="a Beaker job names its workspace"
        )
    if launch.cluster is not None and profile is None and launch.backend not in _ADDRESSED:
        near = nearest_name(launch.cluster, profile_names())
        hint = f"; did you mean {near}?" if near else ""
        yield warned(
            "launch.cluster",
            because=f"no profile of cluster {launch.cluster}: GPU and driver are unknown{hint}",
        )
    if profile is None:
        return
    if launch.gpus_per_replica > profile.gpus_per_node:
        yield refused(
            "launch.gpus_per_replica",
            "launch.cluster",
            because=f"a node of {profile.name} has {profile.gpus_per_node} GPUs",
        )
    if launch.backend == "beaker" and launch.gpus_per_replica == 0 and not profile.takes_cpu_jobs:
        yield refused(
            "launch.cluster",
            "launch.gpus_per_replica",
            because=f"{profile.name} takes no CPU-only jobs",
            allowed="ai2/saturn, then ai2/jupiter",
        )


def paths_of(spec: RunSpec) -> dict[str, Path]:
    """Every path of the run that its job reads or writes, by dotted field."""
    judge = spec.reward.judge
    found = {
        "model.path": spec.model.path,
        "model.tokenizer": spec.model.tokenizer,
        "model.chat_template": spec.model.chat_template,
        "data.train": spec.data.train,
        "core.reference": spec.core.reference,
        "teacher.path": spec.teacher.path if spec.teacher else None,
        "reward.judge.model": judge.model if judge else None,
        "reward.judge.template": judge.template if judge else None,
        "output.root": spec.output.root,
    }
    cache = spec.output.compiler_cache
    if isinstance(cache, Path):  # an object store is under no mount
        found["output.compiler_cache"] = cache
    for name, each in spec.evaluation.sets.items():
        found[f"evaluation.sets.{name}.prompts"] = each.prompts
    return {field: path for field, path in found.items() if path is not None}


def _mounts(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    launch = spec.launch
    if launch.backend == "local":
        return
    mounts = ", ".join(launch.mount_paths) or "there are none"
    for field, path in paths_of(spec).items():
        if not launch.covers(path):
            yield refused(
                field,
                "launch.weka_mounts",
                because=f"{path} is under no mount of the job",
                allowed=f"a path under launch.weka_mounts ({mounts})",
            )


def _names_twice(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    for name in sorted(set(spec.launch.env) & set(spec.launch.secrets)):
        yield warned(
            "launch.env",
            "launch.secrets",
            because=f"{name} is in env and in secrets: the secret wins",
        )


def _protection(spec: RunSpec, _: ModelShape | None) -> Iterator[Finding]:
    launch = spec.launch
    if launch.backend == "local":
        return
    outlives = launch.timeout == 0 or launch.timeout > launch.min_runtime
    periodic = (
        spec.core.max_updates is None or spec.checkpoint.every_updates < spec.core.max_updates
    )
    periodic = periodic or spec.checkpoint.every_seconds is not None
    if outlives and not (periodic and launch.auto_resume != "off"):
        missing = [] if periodic else ["periodic checkpoints"]
        missing += ["launch.auto_resume"] if launch.auto_resume == "off" else []
        yield warned(
            "launch.min_runtime",
            because="the job can run past its protection (launch.min_runtime) without "
            + " and ".join(missing),
        )


LAUNCH_RULES: tuple[Rule, ...] = (_replicas, _cluster, _mounts, _names_twice, _protection)
