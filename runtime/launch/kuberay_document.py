"""The RayJob of a submission, for the KubeRay operator; validated before it is sent."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from runtime.launch.submission import ENTRY, Submission

SCHEMA = Path(__file__).parent / "schemas" / "kuberay-rayjob-v1.schema.json.gz"
_TTL_S = 3600
"""The finished cluster stays so long, for its logs."""
_WORKERS = "nodes"
MARK = "milepost.mark"
"""Annotation: ``Submission.mark``."""


def rayjob(
    submission: Submission,
    *,
    namespace: str = "default",
    queue: str | None = None,
    scheduler: str | None = None,
) -> dict[str, Any]:
    """The RayJob: a head that is node 0, and a fixed group of the others.

    Args:
        submission: what runs.
        namespace: of Kubernetes.
        queue: admitted whole or not at all, by the gang scheduler's queue of this name.
        scheduler: ``kueue`` or ``volcano``; None: no gang scheduler.
    """
    launch = submission.spec.launch
    labels = {"milepost.run": submission.key, **_gang(queue, scheduler)}
    cluster: dict[str, Any] = {
        "headGroupSpec": {"rayStartParams": _start(submission), "template": _pod(submission)}
    }
    if launch.replicas > 1:
        others = launch.replicas - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": _WORKERS,
                "replicas": others,
                "minReplicas": others,
                "maxReplicas": others,
                "rayStartParams": {},
                "template": _pod(submission),
            }
        ]
    spec: dict[str, Any] = {
        "entrypoint": f"python -m {ENTRY}",
        "jobId": submission.key,
        "submissionMode": "HTTPMode",
        # Milepost alone submits again: a retry of the operator would be a second launcher.
        "backoffLimit": 0,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _TTL_S,
        "rayClusterSpec": cluster,
    }
    if launch.timeout > 0:
        spec["activeDeadlineSeconds"] = int(launch.timeout)
    if scheduler == "kueue":
        spec["suspend"] = True
    metadata = {
        "name": submission.key,
        "namespace": namespace,
        "labels": labels,
        "annotations": {MARK: submission.mark},
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def schema_problems(document: dict[str, Any]) -> list[str]:
    """Where a RayJob departs from the operator's schema: typos, wrong types, missing parts."""
    import jsonschema

    errors = jsonschema.Draft7Validator(_schema()).iter_errors(document)
    return sorted(f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in errors)


@cache
def _schema() -> dict[str, Any]:
    return json.loads(gzip.decompress(SCHEMA.read_bytes()))


def _gang(queue: str | None, scheduler: str | None) -> dict[str, str]:
    if scheduler == "kueue":
        return {"kueue.x-k8s.io/queue-name": queue or "default"}
    if scheduler == "volcano":
        return {"volcano.sh/queue-name": queue or "default"}
    return {}


def _start(submission: Submission) -> dict[str, str]:
    del submission
    return {"dashboard-host": "0.0.0.0"}


def _pod(submission: Submission) -> dict[str, Any]:
    launch = submission.spec.launch
    volumes, mounts = _volumes(submission)
    amounts: dict[str, Any] = {}
    if launch.gpus_per_replica > 0:
        amounts["nvidia.com/gpu"] = launch.gpus_per_replica
    if launch.memory is not None:
        amounts["memory"] = str(launch.memory)
    container: dict[str, Any] = {
        "name": "ray",
        "image": submission.image or "",
        "env": _variables(submission),
        "volumeMounts": mounts,
    }
    if amounts:
        # Equal on both sides: a node is taken whole, and never overcommitted.
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
    }
    if launch.replicas > 1 and launch.gpus_per_replica > 0:
        pod["hostNetwork"] = True
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    return {"metadata": {"labels": {"milepost.run": submission.key}}, "spec": pod}


def _variables(submission: Submission) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in sorted(submission.environment().items())
    ]
    # A secret's name is its object; the variable's own name is the key in it.
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        for name, secret in sorted(submission.spec.launch.secrets.items())
    ]


def _volumes(submission: Submission) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    launch = submission.spec.launch
    memory: dict[str, Any] = {"medium": "Memory"}
    if launch.shared_memory is not None:
        memory["sizeLimit"] = str(launch.shared_memory)
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": memory}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for index, mount in enumerate(launch.weka_mounts):
        claim, _, path = mount.rpartition(":")
        name = f"mount-{index}"
        source: dict[str, Any] = (
            {"persistentVolumeClaim": {"claimName": claim}}
            if claim
            else {"hostPath": {"path": path}}
        )
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path})
    return volumes, mounts
