"""The Beaker experiment of a submission, as JSON. Needs no client: ``plan --render`` prints it."""

from __future__ import annotations

import re
from typing import Any

from configs.clusters import find_profile
from configs.launch import Launch
from configs.run import RunSpec
from runtime.launch.submission import ENTRY, Submission

RESULTS = "/output"
"""What is left there stays with the job."""
TASK = "main"
_NANOSECONDS = 1_000_000_000
_RETRIES = 10
"""Of the scheduler's own, under auto_resume = "scheduler"."""
_WEKA = re.compile(r"/weka/([^/]+)")


def beaker_document(submission: Submission) -> dict[str, Any]:
    """The spec that is sent: one task for all replicas."""
    spec = submission.spec
    launch = spec.launch
    document: dict[str, Any] = {
        "version": "v2",
        "description": f"{spec.name}, attempt {submission.payload.attempt}, {submission.mark}",
        "tasks": [_task(submission)],
    }
    if launch.budget is not None:
        document["budget"] = launch.budget
    if launch.auto_resume == "scheduler":
        document["retry"] = {"allowedTaskRetries": _RETRIES}
    return document


def _task(submission: Submission) -> dict[str, Any]:
    launch = submission.spec.launch
    task: dict[str, Any] = {
        "image": _image(submission.image),
        "context": _context(launch),
        "result": {"path": RESULTS},
        "constraints": {"cluster": [launch.cluster]},
        "name": TASK,
        "command": ["python", "-m", ENTRY],
        "envVars": _variables(submission),
        "datasets": [_mount(mount) for mount in launch.weka_mounts],
        "resources": _resources(launch),
        "hostNetworking": needs_host_network(submission.spec),
    }
    if launch.replicas > 1:
        task |= {
            "replicas": launch.replicas,
            "leaderSelection": True,
            "propagateFailure": True,
            "propagatePreemption": True,
            "synchronizedStartTimeout": _nanoseconds(launch.synchronized_start_timeout),
        }
    if launch.timeout > 0:
        task["timeout"] = _nanoseconds(launch.timeout)
    return task


def needs_host_network(spec: RunSpec) -> bool:
    """Several nodes, and judges that others reach; one node alone is bridged."""
    return spec.launch.replicas > 1 or spec.reward.judge is not None


def _image(image: str | None) -> dict[str, str]:
    if image is None:
        return {}
    return {"docker": image} if "@" in image else {"beaker": image}


def _context(launch: Launch) -> dict[str, Any]:
    profile = find_profile(launch.cluster)
    priority = launch.priority or (profile.priority if profile is not None else "normal")
    context: dict[str, Any] = {"priority": priority}
    # Zero is said aloud by GPU jobs; a CPU-only job has no such key.
    if launch.gpus_per_replica > 0:
        context["minRuntime"] = _nanoseconds(launch.min_runtime)
    context["autoResume"] = launch.auto_resume == "scheduler"
    return context


def _variables(submission: Submission) -> list[dict[str, str]]:
    plain = [
        {"name": name, "value": value} for name, value in sorted(submission.environment().items())
    ]
    secrets = sorted(submission.spec.launch.secrets.items())
    return plain + [{"name": name, "secret": secret} for name, secret in secrets]


def _mount(mount: str) -> dict[str, Any]:
    source, _, path = mount.rpartition(":")
    weka = _WEKA.fullmatch(path.rstrip("/"))
    if not source and weka is None:
        return {"source": {"hostPath": path}, "mountPath": path}
    return {"source": {"weka": source or (weka[1] if weka else "")}, "mountPath": path}


def _resources(launch: Launch) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if launch.gpus_per_replica > 0:
        resources["gpuCount"] = launch.gpus_per_replica
    if launch.memory is not None:
        resources["memory"] = _size(launch.memory)
    if launch.shared_memory is not None:
        resources["sharedMemory"] = _size(launch.shared_memory)
    return resources


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
