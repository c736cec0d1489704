"""The flow is unnecessary for the run, and shows all of it to people."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from flows.train import train
from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.ray, pytest.mark.prefect, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def prefect() -> Iterator[None]:
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For a command in a process of its own: it talks to our server and starts none itself.

    A server that a killed command had started would be left to nobody.
    """
    mark = uuid.uuid4().hex
    yield {**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "STARTED_BY": mark}
    assert servers_of(mark) == []


def servers_of(mark: str) -> list[list[str]]:
    found: list[list[str]] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STARTED_BY") == mark:
                found.append(process.cmdline())
    return [command for command in found if any("prefect.server" in part for part in command)]


def shown(state: State[str]) -> tuple[FlowRun, list[str], dict[str, str]]:
    """The flow run, the names of its task runs in order, run counts of its retried tasks."""
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(state.state_details.flow_run_id)
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
        )
        tasks.sort(key=lambda task: task.start_time)
        retried = {t.name: str(t.run_count) for t in tasks if t.run_count > 1}
        return flow_run, [task.name for task in tasks], retried


def test_a_flow_shows_every_committed_step_and_its_artifacts(run: Run) -> None:
    state = train(run.file, [], return_state=True)
    assert (state.type.value, state.name) == ("COMPLETED", "Complete")
    flow_run, tasks, retried = shown(state)
    assert [name for name in tasks if name[:5] in ("train", "commi", "evalu")] == [
        "train collections 1-2",
        "commit update 2",
        "train collections 3-4",
        "commit update 4",
        "evaluate held at update 4",
        "train collections 5-6",
        "commit update 6",
        "train collections 7-8",
        "commit update 8",
        "evaluate held at update 8",
    ]
    assert retried == {}
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        )
        names = [s.name for s in client.read_flow_run_states(flow_run.id)]
    assert {a.key for a in artifacts} == {"e2e-progress", "e2e-collections", "e2e-summary"}
    summary = next(a.data for a in artifacts if a.key == "e2e-summary")
    assert "state: **complete**" in summary
    assert (run.root.reports / "report.html").is_file()
    assert names[-3:] == ["Preparing", "Training", "Complete"]
    assert_whole(run, updates=8)

    # A second flow over a complete run starts nothing and ends as complete.
    again = train(run.file, [], return_state=True)
    assert again.name == "Complete"
    assert run.epoch == 1


def test_a_lost_run_is_taken_up_by_the_retry_of_the_waiting_task(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    found: list[State[str]] = []
    flow = threading.Thread(target=lambda: found.append(train(run.file, [], return_state=True)))
    flow.start()
    run.until_committed(2)
    for role in ("guard", "session"):
        for process in run.role(role):
            process.kill()
    flow.join()
    assert found[0].name == "Complete"
    _, _, retried = shown(found[0])
    assert list(retried.values()) == ["2"], retried
    assert run.epoch == 2
    assert_whole(run, updates=8)


def test_a_stopped_run_ends_its_flow_as_stopped(make_run: Callable[..., Run]) -> None:
    run = make_run()
    found: list[State[str]] = []
    flow = threading.Thread(target=lambda: found.append(train(run.file, [], return_state=True)))
    flow.start()
    run.until_committed(0)
    run.stop("stop")
    flow.join()
    assert (found[0].type.value, found[0].name) == ("CANCELLED", "Stopped")
    assert (run.end.state, run.end.activity) == ("training", "stopped")


def test_killing_the_command_kills_no_run_and_the_next_one_attaches(
    make_run: Callable[..., Run], environment: dict[str, str]
) -> None:
    run = make_run("core.max_updates=12")
    command = [sys.executable, "-m", "flows.cli", "run", str(run.file)]
    command += [f"--set={text}" for text in run.sets]
    quiet = subprocess.DEVNULL
    first = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        run.until_committed(2)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert run.role("guard")
    second = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "attached: attempt 1" in second.stdout
    assert run.epoch == 1
    assert_whole(run, updates=12)
