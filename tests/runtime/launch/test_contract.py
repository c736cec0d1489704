"""The Beaker document of the three-node preset, and every way to break the contract."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from configs.plan import make_plan
from configs.problems import RunFileError
from runtime.errors import LaunchRefused
from runtime.launch.beaker_document import beaker_document
from runtime.launch.contract import violations
from runtime.launch.rendering import rendered
from runtime.launch.submission import PAYLOAD_VARIABLE, Payload
from tests.runtime.launch.submissions import IMAGE, PRESETS, submission, three_node

HOUR = 3600 * 10**9
Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    return beaker_document(submission(three_node()))


def found(document: Document) -> list[str]:
    loaded = three_node()
    return [v.name for v in violations(document, loaded.spec, make_plan(loaded))]


def test_three_nodes_are_one_task_that_keeps_the_contract(document: Document) -> None:
    assert found(document) == []
    (task,) = document["tasks"]
    assert (task["replicas"], task["resources"]["gpuCount"]) == (3, 8)
    flags = ("leaderSelection", "hostNetworking", "propagateFailure", "propagatePreemption")
    assert all(task[flag] is True for flag in flags)
    assert task["synchronizedStartTimeout"] == HOUR
    assert task["timeout"] == 48 * HOUR
    assert task["context"] == {"priority": "high", "minRuntime": 8 * HOUR, "autoResume": False}
    assert task["resources"] == {"gpuCount": 8, "memory": "1024GiB", "sharedMemory": "256GiB"}
    assert task["image"] == {"beaker": IMAGE}
    assert task["datasets"] == [
        {"source": {"weka": "oe-adapt-default"}, "mountPath": "/weka/oe-adapt-default"}
    ]
    secrets = {v["name"]: v["secret"] for v in task["envVars"] if "secret" in v}
    assert secrets == {"HF_TOKEN": "hf-token", "WANDB_API_KEY": "wandb-key"}
    plain = {v["name"]: v["value"] for v in task["envVars"] if "value" in v}
    assert plain["LD_LIBRARY_PATH"].startswith("/usr/local/cuda/compat:")
    assert json.loads(Payload.decode(plain[PAYLOAD_VARIABLE]).run)["name"] == "three-node"


def test_the_command_prints_the_bytes_of_the_library_call() -> None:
    preset = PRESETS / "three-node.toml"
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "flows.cli", "plan", str(preset), "--render", "--image", IMAGE],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.rstrip("\n")
        for _ in range(2)
    }
    assert outputs == {rendered(three_node(), image=IMAGE, environ={})}


def _split(document: Document) -> None:
    task = document["tasks"][0]
    document["tasks"] = [{**task, "name": f"node-{i}", "replicas": 1} for i in range(3)]


def _change(**fields: Any) -> Callable[[Document], None]:
    return lambda document: document["tasks"][0].update(fields)


def _drop(name: str) -> Callable[[Document], None]:
    return lambda document: document["tasks"][0].pop(name)


def _variable(name: str) -> Callable[[Document], None]:
    return lambda document: document["tasks"][0]["envVars"].append({"name": name, "value": "1"})


def _context(**fields: Any) -> Callable[[Document], None]:
    return lambda document: document["tasks"][0]["context"].update(fields)


BREACHES: dict[str, tuple[Callable[[Document], None], set[str]]] = {
    "separate tasks": (_split, {"group.separate-tasks"}),
    "no task": (lambda d: d.update(tasks=[]), {"group.separate-tasks"}),
    "fewer replicas": (_change(replicas=2), {"group.size", "placement.gpus"}),
    "no leader": (_change(leaderSelection=False), {"group.leader-selection"}),
    "bridge network": (_change(hostNetworking=False), {"group.host-networking"}),
    "failure stays": (_drop("propagateFailure"), {"group.propagate-failure"}),
    "preemption stays": (_drop("propagatePreemption"), {"group.propagate-preemption"}),
    "no start bound": (
        _drop("synchronizedStartTimeout"),
        {"group.synchronized-start-timeout"},
    ),
    "partial node": (
        _change(resources={"gpuCount": 4}),
        {"placement.partial-node", "placement.gpus"},
    ),
    "other cluster": (_change(constraints={"cluster": ["ai2/saturn"]}), {"placement.cluster"}),
    "uncovered mount": (_change(datasets=[]), {"mounts.uncovered"}),
    "relative mount": (
        lambda d: d["tasks"][0]["datasets"].append({"source": {}, "mountPath": "data"}),
        {"mounts.relative"},
    ),
    "tag": (_change(image={"docker": "registry.example.org/app:latest"}), {"image.tag"}),
    "name": (_change(image={"beaker": "me/my-image"}), {"image.tag"}),
    "no image": (_change(image={}), {"image.missing"}),
    "ray address": (_variable("RAY_ADDRESS"), {"environment.reserved"}),
    "rank": (_variable("BEAKER_REPLICA_RANK"), {"environment.reserved"}),
    "mask": (_variable("CUDA_VISIBLE_DEVICES"), {"environment.reserved"}),
    "twice": (_variable("HF_TOKEN"), {"environment.twice"}),
    "priority": (_context(priority="asap"), {"context.priority"}),
    "old field": (_context(preemptible=True), {"context.preemptible"}),
    "seconds": (_change(timeout=172800), {"durations.timeout"}),
    "text": (_change(synchronizedStartTimeout="60m"), {"durations.synchronized-start-timeout"}),
    "no protection said": (
        lambda d: d["tasks"][0]["context"].pop("minRuntime"),
        {"context.min-runtime"},
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_each_breach_is_named(document: Document, breach: str) -> None:
    broken = copy.deepcopy(document)
    do, names = BREACHES[breach]
    do(broken)
    assert set(found(broken)) == names


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("launch.gpus_per_replica=4", "launch.gpus_per_replica"),
        ('launch.weka_mounts=["/other"]', "output.root"),
        ('launch.image="registry.example.org/app:latest"', "launch.image"),
        ('launch.env={RAY_ADDRESS="auto"}', "launch.env"),
        ('launch.secrets={WORLD_SIZE="a-secret"}', "launch.secrets"),
    ],
)
def test_what_the_run_file_can_break_is_refused_at_its_field(change: str, field: str) -> None:
    with pytest.raises(RunFileError) as refused:
        three_node(change)
    assert field in {problem.field for problem in refused.value.problems}


def test_rendering_without_an_image_or_with_two_is_refused() -> None:
    with pytest.raises(LaunchRefused, match=r"image\.missing"):
        rendered(three_node(), environ={})
    other = "01J9ZK8Q2V7N4R5T6W8XY0ABCE"
    assert f'"beaker": "{other}"' in rendered(
        three_node(), environ={"MILEPOST_EXISTING_IMAGE": other}
    )


def test_one_cpu_node_is_bridged_and_says_nothing_of_protection() -> None:
    loaded = three_node(
        "launch.replicas=1", "launch.gpus_per_replica=0", 'rollout.engine="embedded"',
        'core.backend="torch"', "core.tensor=1", "core.context=1", "core.expert=1",
        "rollout.tensor=1",
        "core.max_tokens_per_gpu=20000", 'launch.cluster="ai2/saturn"', 'launch.min_runtime="0s"',
    )  # fmt: skip
    document = beaker_document(submission(loaded))
    (task,) = document["tasks"]
    assert violations(document, loaded.spec, make_plan(loaded)) == []
    assert task["hostNetworking"] is False
    assert "replicas" not in task
    assert "minRuntime" not in task["context"]


def test_zero_protection_of_a_gpu_job_is_said() -> None:
    document = beaker_document(submission(three_node('launch.min_runtime=""')))
    assert document["tasks"][0]["context"]["minRuntime"] == 0


def test_the_schedulers_own_retry_is_asked_for_only_then() -> None:
    document = beaker_document(submission(three_node('launch.auto_resume="scheduler"')))
    assert document["retry"]["allowedTaskRetries"] > 0
    assert document["tasks"][0]["context"]["autoResume"] is True
    assert "retry" not in beaker_document(submission(three_node()))


def test_beakers_own_types_keep_every_field(document: Document) -> None:
    beaker = pytest.importorskip("beaker", reason="pip install -e '.[launch]'")
    spec = beaker.BeakerExperimentSpec.from_json(copy.deepcopy(document))
    assert spec.to_json() == document
