"""The launch flow against a scheduler that fails, preempts, and at last lets the run finish."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("beaker", reason="pip install -e '.[launch]'")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from pydantic import SecretStr

from blocks import BeakerAccount
from flows.launch import launch
from runtime.errors import Interrupted
from runtime.launch import watching
from tasks import launch as steps
from tests.runtime.launch import fake_beaker
from tests.runtime.launch.fake_beaker import TOKEN, FakeBeaker
from tests.runtime.launch.submissions import IMAGE, PRESETS
from tests.runtime.launch.test_beaker_status import CANCELED, FAILED, RUNNING, SUCCEEDED, job

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]
PRESET = PRESETS / "three-node.toml"


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def beaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None) -> Iterator[FakeBeaker]:
    monkeypatch.setenv("MILEPOST_LAUNCH_RECEIPTS", str(tmp_path / "receipts"))
    monkeypatch.setattr(watching, "BACKOFF_S", 0.01)
    monkeypatch.setattr(steps, "POLL_S", 0.05)
    with fake_beaker.serving(tmp_path) as beaker:
        yield beaker


def account(beaker: FakeBeaker) -> BeakerAccount:
    return BeakerAccount(token=SecretStr(TOKEN), agent_address=beaker.agent, rpc_address=beaker.rpc)


class Scheduler(threading.Thread):
    """Lets each attempt run and then become what the story says."""

    def __init__(self, beaker: FakeBeaker, story: list[Callable[[int], Any]]) -> None:
        super().__init__(daemon=True)
        self._beaker = beaker
        self._story = story

    def run(self) -> None:
        for number, ending in enumerate(self._story, start=1):
            while len(self._beaker.experiments) < number:
                time.sleep(0.02)
            task = list(self._beaker.experiments.values())[-1].experiment.tasks[0].id
            for make in (lambda rank: job(RUNNING, rank=rank, size=3), ending):
                jobs = [make(rank) for rank in range(3)]
                for each in jobs:
                    each.task_id = task
                self._beaker.jobs[:] = jobs
                time.sleep(0.2)


def preempted(rank: int) -> Any:
    return job(CANCELED, rank=rank, size=3, code=1 if rank else 9)


def succeeded(rank: int) -> Any:
    return job(SUCCEEDED, rank=rank, size=3, exit_code=0)


def lost(rank: int) -> Any:
    return job(CANCELED, rank=rank, size=3, code=6)


def test_refusals_are_retried_and_a_preempted_attempt_is_followed_by_another(
    beaker: FakeBeaker,
) -> None:
    beaker.fail_posts = 1
    Scheduler(beaker, [preempted, succeeded]).start()
    sets = [f'launch.image="{IMAGE}"']
    state = launch(PRESET, sets, beaker=account(beaker), return_state=True)
    assert (state.name, state.message) == ("Complete", "three-node, attempt 2")
    assert [name[-3:] for name in beaker.experiments] == ["-a1", "-a2"]
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs()
        submits = sorted(
            (run for run in runs if run.name == "submit three-node"),
            key=lambda run: run.expected_start_time or run.created,
        )
        assert [run.run_count for run in submits] == [2, 1]
        states = [s.name for s in client.read_task_run_states(submits[0].id)]
        assert "AwaitingRetry" in states or "Retrying" in states
        key = ArtifactFilterKey(any_=["three-node-submission"])
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    # What a person sees is what was sent.
    shown = [str(a.data).split("```json\n")[1].split("\n```")[0] for a in artifacts]
    assert {json.dumps(json.loads(text), sort_keys=True) for text in shown} == {
        json.dumps(spec, sort_keys=True) for spec in beaker.specs.values()
    }


def test_it_ends_where_nobody_is_to_go_on(beaker: FakeBeaker) -> None:
    Scheduler(beaker, [lost]).start()
    sets = [f'launch.image="{IMAGE}"', 'launch.auto_resume="off"']
    state = launch(PRESET, sets, beaker=account(beaker), return_state=True)
    assert state.is_failed()
    with pytest.raises(Interrupted, match="a person's decision"):
        state.result(raise_on_failure=True)
    assert len(beaker.experiments) == 1


def test_a_failed_attempt_is_not_followed(beaker: FakeBeaker) -> None:
    Scheduler(beaker, [lambda rank: job(FAILED, rank=rank, size=3, exit_code=1)]).start()
    state = launch(PRESET, [f'launch.image="{IMAGE}"'], beaker=account(beaker), return_state=True)
    assert state.is_failed()
    assert len(beaker.experiments) == 1
