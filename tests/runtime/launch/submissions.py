"""Run files for schedulers, and what they are submitted as."""

from __future__ import annotations

from pathlib import Path

from configs.load import LoadedRun, load_run
from configs.plan import make_plan
from runtime.launch.composing import scheduler_claim, submission_of
from runtime.launch.submission import Submission

PRESETS = Path(__file__).parents[3] / "configs" / "presets"
IMAGE = "01J9ZK8Q2V7N4R5T6W8XY0ABCD"
DIGEST = f"registry.example.org/team/app@sha256:{'ab' * 32}"


def three_node(*sets: str) -> LoadedRun:
    return load_run(PRESETS / "three-node.toml", sets)


def submission(
    loaded: LoadedRun, *, image: str | None = IMAGE, attempt: int = 1, backend: str = "beaker"
) -> Submission:
    plan = make_plan(loaded)
    claim = scheduler_claim(backend, loaded.spec.model_dump_json(), plan)
    return submission_of(loaded, plan, attempt=attempt, image=image, claim=claim)
