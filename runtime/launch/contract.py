"""The group contract: what a rendered Beaker document must keep, each breach by its name.

Checked on the document, whoever made it: what was right in the run file can go wrong on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.clusters import find_profile
from configs.launch import is_immutable_image
from configs.names import is_owned
from configs.plan import Plan
from configs.rules.launching import paths_of
from configs.run import RunSpec

NODE_GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One breach."""

    name: str
    """Stable, such as ``group.separate-tasks``."""
    text: str
    """What was found and what would be right."""

    def __str__(self) -> str:
        """Both."""
        return f"{self.name}: {self.text}"


def violations(document: Mapping[str, Any], spec: RunSpec, plan: Plan) -> list[Violation]:
    """Every breach of the contract by a document; empty when it may be sent.

    Args:
        document: as it would be sent.
        spec: the run it is for.
        plan: of that run: the document must bring its GPUs.
    """
    tasks: Sequence[Mapping[str, Any]] = document.get("tasks") or []
    if len(tasks) != 1:
        return [
            Violation(
                name="group.separate-tasks",
                text=f"{len(tasks)} tasks; the nodes of a run are one task with replicas and "
                "leaderSelection, not tasks or pools of their own",
            )
        ]
    task = tasks[0]
    return [
        Violation(name=name, text=text)
        for check in (_group, _placement, _mounts, _image, _environment, _context, _timeouts)
        for name, text in check(task, spec, plan)
    ]


_Breach = Iterator[tuple[str, str]]


def _group(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    replicas = task.get("replicas", 1)
    if replicas != spec.launch.replicas:
        yield "group.size", f"{replicas} replicas; the run has {spec.launch.replicas} nodes"
    if replicas == 1:
        return
    for key in ("leaderSelection", "hostNetworking", "propagateFailure", "propagatePreemption"):
        if task.get(key) is not True:
            yield f"group.{_dashed(key)}", f"{key} is {task.get(key)}; a group needs it"
    if not task.get("synchronizedStartTimeout"):
        yield (
            "group.synchronized-start-timeout",
            "without it replicas that started wait for the others for ever",
        )


def _placement(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    replicas, gpus = task.get("replicas", 1), (task.get("resources") or {}).get("gpuCount", 0)
    if replicas > 1 and gpus not in (0, NODE_GPUS):
        yield (
            "placement.partial-node",
            f"{replicas} replicas of {gpus} GPUs; several nodes are whole ones of {NODE_GPUS}",
        )
    if replicas * gpus != plan.topology.total_gpus:
        yield (
            "placement.gpus",
            f"{replicas} x {gpus} GPUs; the plan divides {plan.topology.total_gpus}",
        )
    clusters = (task.get("constraints") or {}).get("cluster") or []
    if clusters != [spec.launch.cluster]:
        yield "placement.cluster", f"{clusters}; the run names {spec.launch.cluster}"


def _mounts(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    mounted = [str(each.get("mountPath", "")) for each in task.get("datasets") or []]
    for path in mounted:
        if not path.startswith("/"):
            yield "mounts.relative", f"{path!r} is no absolute directory"
    for field, path in {**paths_of(spec), **_made(plan)}.items():
        if not any(_covers(mount, path) for mount in mounted):
            there = ", ".join(mounted) or "none"
            yield "mounts.uncovered", f"{field} = {path} is under no mount ({there})"


def _made(plan: Plan) -> dict[str, Path]:
    return {name: plan.paths[name] for name in ("export",) if name in plan.paths}


def _covers(mount: str, path: Path) -> bool:
    return f"{path}/".startswith(f"{mount.rstrip('/')}/")


def _image(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    image: Mapping[str, str] = task.get("image") or {}
    named = image.get("beaker") or image.get("docker")
    if named is None:
        yield (
            "image.missing",
            "a Beaker job runs an image: launch.image, MILEPOST_EXISTING_IMAGE, or --image",
        )
    elif not is_immutable_image(named):
        yield "image.tag", f"{named} can come to mean another image; give a digest or an image id"


def _environment(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    names = [str(each.get("name")) for each in task.get("envVars") or []]
    for name in names:
        if is_owned(name):
            yield "environment.reserved", f"{name} belongs to the launcher"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "environment.twice", f"{name} is set twice"


def _context(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    context: Mapping[str, Any] = task.get("context") or {}
    profile = find_profile(spec.launch.cluster)
    known = profile.priorities if profile is not None else ("low", "normal", "high", "urgent")
    if context.get("priority") not in known:
        yield (
            "context.priority",
            f"{context.get('priority')}; the cluster knows {', '.join(known)}",
        )
    if "preemptible" in context:
        yield "context.preemptible", "the old field excludes minRuntime; leave it out"
    if spec.launch.gpus_per_replica > 0 and "minRuntime" not in context:
        yield "context.min-runtime", "GPU jobs say it, 0 included"
    if spec.launch.gpus_per_replica == 0 and "minRuntime" in context:
        yield "context.min-runtime", "CPU-only jobs leave it out"


def _timeouts(task: Mapping[str, Any], spec: RunSpec, plan: Plan) -> _Breach:
    durations = {
        "timeout": task.get("timeout"),
        "synchronizedStartTimeout": task.get("synchronizedStartTimeout"),
        "minRuntime": (task.get("context") or {}).get("minRuntime"),
    }
    for name, value in durations.items():
        # A number is nanoseconds there: one that was meant as seconds is far too small.
        if value is not None and (not isinstance(value, int) or 0 < value < 1_000_000_000):
            yield f"durations.{_dashed(name)}", f"{value!r} is no number of nanoseconds"


def _dashed(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name)
