"""The flows beside their commands, on a Prefect server.

The launch flow meets a scheduler that fails, preempts, and at last lets the run finish; the train
flow comes up when the attempt that it is to show is over.
"""

from __future__ import annotations

import contextvars
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("beaker", reason="pip install -e '.[launch]'")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from pydantic import SecretStr
from typer.testing import CliRunner

from blocks import BeakerAccount
from flows.cli import build_app
from flows.commands import _attached
from flows.commands._attached import Attached
from flows.launch import launch
from flows.train import train
from runtime.errors import Interrupted
from runtime.launch import watching
from runtime.launch.local import LocalLaunch
from runtime.rundir.attempt import EXIT_STOPPED
from runtime.session.status import FAILED as EXIT_FAILED
from runtime.session.status import RESUMABLE
from tasks import launch as steps
from tests.flows.made_run import MadeRun, dead
from tests.runtime.launch import fake_beaker
from tests.runtime.launch.fake_beaker import TOKEN, FakeBeaker
from tests.runtime.launch.submissions import IMAGE, PRESETS
from tests.runtime.launch.test_beaker_status import CANCELED, FAILED, RUNNING, SUCCEEDED, job

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]
PRESET = PRESETS / "three-node.toml"
GONE = (sys.executable, "-c", "pass")


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


def stopped(rank: int) -> Any:
    # The leader's guard says so; the others are ended with it.
    return (
        job(CANCELED, rank=rank, size=3, code=8)
        if rank
        else job(FAILED, rank=rank, size=3, exit_code=EXIT_STOPPED)
    )


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


def test_a_stopped_attempt_cancels_the_flow_and_a_flow_for_it_alone_submits_no_other(
    beaker: FakeBeaker,
) -> None:
    Scheduler(beaker, [stopped]).start()
    sets = [f'launch.image="{IMAGE}"']
    for _ in range(2):
        # The second one, as whoever takes up where the first one broke: it asks for the same.
        state = launch(PRESET, sets, beaker=account(beaker), attempt=1, return_state=True)
        assert (state.type.value, state.name) == ("CANCELLED", "Stopped")
    assert len(beaker.experiments) == 1


# -- the train flow beside its command -----------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None) -> Iterator[MadeRun]:
    """A run whose first attempt trains."""
    monkeypatch.setattr("runtime.launch.start.LocalLaunch", partial(LocalLaunch, guard=GONE))
    monkeypatch.setattr(_attached, "quiet_prefect", lambda: None)
    made = MadeRun(tmp_path)
    made.begin()
    made.view()
    before = signal.getsignal(signal.SIGINT)
    yield made
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(("how", "code"), [("stopped", RESUMABLE), ("failed", EXIT_FAILED)])
def test_what_ended_between_the_command_and_its_flow_is_not_taken_up_again(
    live: MadeRun, how: str, code: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow needs seconds to come up, and more where it brings a server of its own."""
    context, run_flow = contextvars.copy_context(), Attached._run_flow
    states: list[str | None] = []
    monkeypatch.setattr(
        "flows.train.train", lambda *given, **named: states.append(train(*given, **named).name)
    )

    def late(attached: Attached) -> None:
        if how == "stopped":
            live.end("training", 0, activity="stopped", ended_by="stop")
        else:
            live.end("failed", 0, failure=dead())
        context.run(run_flow, attached)

    monkeypatch.setattr(Attached, "_run_flow", late)
    given = [command, str(live.file), "--json"]
    done = CliRunner().invoke(build_app(given), given)
    assert states == [how.capitalize()], done.stderr
    assert live.root.attempt_numbers() == [1]
    answer = json.loads(done.stdout)
    assert (answer["attempt"], answer["state"]) == (1, "training" if how == "stopped" else how)
    assert done.exit_code == code
