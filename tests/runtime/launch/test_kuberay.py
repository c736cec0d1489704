"""The RayJob: valid by the operator's schema, and submitted through the Kubernetes API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="pip install -e '.[launch]'")

from configs.load import LoadedRun
from runtime.errors import LaunchRefused, ServiceUnavailable
from runtime.launch.kuberay import KubeRayLaunch, classify, kuberay_backend
from runtime.launch.kuberay_document import rayjob, schema_problems
from runtime.launch.rendering import rendered
from runtime.launch.standing import AttemptClass
from runtime.launch.submitting import Sender, submit_run
from runtime.launch.watching import Watcher
from tests.runtime.launch import fake_kubernetes
from tests.runtime.launch.fake_kubernetes import NAMESPACE, FakeKubernetes
from tests.runtime.launch.submissions import DIGEST, submission, three_node

KUBERAY = ('launch.backend="kuberay"', 'launch.env={A="b"}')


@pytest.fixture
def loaded() -> LoadedRun:
    return three_node(*KUBERAY)


@pytest.fixture
def document(loaded: LoadedRun) -> dict[str, Any]:
    return rayjob(submission(loaded, image=DIGEST, backend="kuberay"))


def test_three_nodes_are_a_head_and_two_workers_of_whole_nodes(document: dict[str, Any]) -> None:
    assert schema_problems(document) == []
    spec = document["spec"]
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert [workers[k] for k in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    for template in (spec["rayClusterSpec"]["headGroupSpec"]["template"], workers["template"]):
        (container,) = template["spec"]["containers"]
        assert container["image"] == DIGEST
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert template["spec"]["hostNetwork"] is True
        mounted = {m["mountPath"] for m in container["volumeMounts"]}
        assert mounted == {"/dev/shm", "/weka/oe-adapt-default"}
        secret = next(e for e in container["env"] if e["name"] == "HF_TOKEN")
        assert secret["valueFrom"]["secretKeyRef"]["name"] == "hf-token"
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (0, 48 * 3600)
    assert spec["entrypoint"] == "python -m runtime.launch.entry"
    assert spec["jobId"] == document["metadata"]["name"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["spec"].update(entryPoint="x"), "entryPoint"),
        (lambda d: d["spec"].update(backoffLimit="0"), "'0' is not of type 'integer'"),
        (
            lambda d: d["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("template"),
            "'template' is a required property",
        ),
        (
            lambda d: d["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(replicass=2),
            "replicass",
        ),
    ],
)
def test_the_schema_catches_typos_types_and_what_is_missing(
    document: dict[str, Any], change: Any, said: str
) -> None:
    change(document)
    assert said in "; ".join(schema_problems(document))


@pytest.mark.parametrize(
    ("scheduler", "label"),
    [("kueue", "kueue.x-k8s.io/queue-name"), ("volcano", "volcano.sh/queue-name")],
)
def test_gang_schedulers_get_their_labels(loaded: LoadedRun, scheduler: str, label: str) -> None:
    document = rayjob(
        submission(loaded, image=DIGEST, backend="kuberay"), queue="train", scheduler=scheduler
    )
    assert schema_problems(document) == []
    assert document["metadata"]["labels"][label] == "train"
    # Kueue starts what it admits; everything else must not be left suspended.
    assert document["spec"].get("suspend", False) is (scheduler == "kueue")


def test_rendering_needs_an_image_by_digest(loaded: LoadedRun) -> None:
    with pytest.raises(LaunchRefused, match=r"image\.missing"):
        rendered(loaded, environ={})
    assert json.loads(rendered(loaded, image=DIGEST, environ={}))["kind"] == "RayJob"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ({}, AttemptClass.PENDING),
        ({"jobDeploymentStatus": "Suspended"}, AttemptClass.PENDING),
        ({"jobDeploymentStatus": "Initializing"}, AttemptClass.STARTING),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, AttemptClass.RUNNING),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, AttemptClass.SUCCEEDED),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, AttemptClass.CANCELED),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}, AttemptClass.FAILED),
        (
            {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": "DeadlineExceeded"},
            AttemptClass.FAILED,
        ),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING"}, AttemptClass.INTERRUPTED),
    ],
)
def test_class_of_a_rayjob(status: dict[str, str], kind: AttemptClass) -> None:
    assert classify(status).kind is kind


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    pytest.importorskip("kubernetes", reason="pip install -e '.[launch]'")
    monkeypatch.setenv("MILEPOST_LAUNCH_RECEIPTS", str(tmp_path / "receipts"))
    with fake_kubernetes.serving() as fake:
        config = str(fake.config(tmp_path / "kubeconfig"))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", config)
        yield fake


def backend() -> KubeRayLaunch:
    return kuberay_backend("c", environ={"MILEPOST_K8S_NAMESPACE": NAMESPACE})


def test_it_is_submitted_once_watched_and_stopped(
    kubernetes: FakeKubernetes, loaded: LoadedRun
) -> None:
    sender = Sender(backend=backend(), image=DIGEST)
    assert submit_run(loaded, sender).how == "started"
    assert submit_run(loaded, sender).how == "attached"
    ((name, sent),) = kubernetes.objects.items()
    assert sent == json.loads(
        rendered(loaded, image=DIGEST, environ={"MILEPOST_K8S_NAMESPACE": NAMESPACE})
    )
    watcher = Watcher(loaded, sender)
    assert watcher.look(1).kind is AttemptClass.PENDING
    sent["status"] = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    assert watcher.look(1).kind is AttemptClass.RUNNING
    receipt = watcher.receipt(1)
    assert receipt is not None
    sender.backend.stop(receipt)
    assert name not in kubernetes.objects
    assert watcher.look(1).kind is AttemptClass.STOPPED


def test_an_api_that_is_away_can_be_asked_again(
    kubernetes: FakeKubernetes, loaded: LoadedRun
) -> None:
    kubernetes.fail_posts = 1
    sender = Sender(backend=backend(), image=DIGEST)
    with pytest.raises(ServiceUnavailable, match="503"):
        submit_run(loaded, sender)
    assert submit_run(loaded, sender).attempt == 1


def test_a_cluster_without_operator_or_namespace_is_refused_with_both_causes(
    kubernetes: FakeKubernetes, loaded: LoadedRun
) -> None:
    kubernetes.is_unknown = True
    with pytest.raises(LaunchRefused, match=f"namespace {NAMESPACE}: either .* the KubeRay"):
        submit_run(loaded, Sender(backend=backend(), image=DIGEST))
    assert kubernetes.objects == {}
