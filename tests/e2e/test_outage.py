"""A Prefect server that goes away under a live run, and what people see once it is back.

Minutes of waiting: ``make test-outage``.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.states import State, StateType

from runtime.rundir import history
from tests.e2e.checks import assert_whole
from tests.e2e.prefect_server import PrefectServer, prefect_server
from tests.e2e.running import Run

pytestmark = [
    pytest.mark.outage,
    pytest.mark.ray,
    pytest.mark.prefect,
    pytest.mark.timeout(1800),
]

LONG_S = 180.0
PATIENCE_S = 700.0
"""Prefect's client asks again after 2, 4, ... 256 s."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectServer]:
    with prefect_server(tmp_path / "prefect") as server:
        yield server


@pytest.fixture
def long_run(make_run: Callable[..., Run]) -> Run:
    """Goes on until it is told to end; a boundary every 20 updates."""
    return make_run(
        "core.max_updates=100000",
        "data.epochs=2000",
        "evaluation.every_updates=100000",
        "checkpoint.every_updates=20",
    )


@pytest.fixture
def flow(long_run: Run, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The flow of a live attempt as a process of its own, as a worker runs it."""
    launch = long_run.start()
    attempt = long_run.root.attempt(launch.attempt).path
    with (tmp_path / "flow.log").open("wb") as log:
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", "--attempt", str(attempt)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield flow
    finally:
        flow.kill()
        flow.wait()


def test_a_restarted_server_costs_nothing_and_shows_all_of_the_run_afterwards(
    server: PrefectServer, long_run: Run, flow: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    run = long_run
    until_shown(run, "Training")
    run.until_committed(20)

    # While it trains; a short one, as a restart is.
    server.kill()
    at = history.committed_update(run.records)
    run.until_committed(at + 40)
    server.start()
    # The next stretches are shown before the server goes again.
    shown = len(task_runs())
    run.until(lambda: len(task_runs()) > shown, "the flow to go on", attach=False)

    # Longer than Prefect's client waits by itself, and over the end of the run.
    server.kill()
    time.sleep(LONG_S)
    assert flow.poll() is None
    run.stop("final")
    run.until(lambda: history.current_end(run.records) is not None, "the end", attach=False)
    server.start()
    assert flow.wait(PATIENCE_S) == 0, (tmp_path / "flow.log").read_text()[-3000:]

    assert_whole(run, updates=run.end.update)
    assert run.epoch == 1
    flow_run = the_flow_run()
    assert (state_of(flow_run).type, state_of(flow_run).name) == (StateType.COMPLETED, "Complete")
    assert phases(flow_run) == ["Preparing", "Training", "Complete"]
    tasks = task_runs()
    assert {state_of(task).name for task in tasks} == {"Completed"}, named(tasks)
    # Every stretch once, in order, without a gap, up to the end.
    stretches = [t.name.removeprefix("train collections ") for t in tasks if "collecti" in t.name]
    bounds = [tuple(map(int, each.split("-"))) for each in stretches]
    assert bounds == [(20 * n + 1, 20 * n + 20) for n in range(len(bounds))]
    assert bounds[-1][1] >= run.end.update
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        )
    tables = Counter(a.description for a in artifacts if a.key == "e2e-collections")
    assert tables == Counter(f"collections {each}" for each in stretches)
    (summary,) = [a.data for a in artifacts if a.key == "e2e-summary"]
    assert "state: **complete**" in str(summary)


def test_a_cancellation_after_a_restart_still_stops_the_run_with_a_commit(
    server: PrefectServer, long_run: Run, flow: subprocess.Popen[bytes]
) -> None:
    run = long_run
    until_shown(run, "Training")
    server.kill()
    run.until_committed(20)
    server.start()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(
            the_flow_run().id, State(type=StateType.CANCELLING, name="Cancelling"), force=True
        )
    run.until(lambda: history.current_end(run.records) is not None, "the end", attach=False)
    end = run.end
    assert (end.ended_by, end.activity) == ("stop", "stopped")
    assert run.commits[-1].update == end.update
    flow.wait(PATIENCE_S)
    state = state_of(the_flow_run())
    assert (state.type, state.name) == (StateType.CANCELLED, "Stopped")


def the_flow_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs()
        return flow_run


def until_shown(run: Run, phase: str) -> None:
    def is_shown() -> bool:
        with get_client(sync_client=True) as client:
            return [state_of(f).name for f in client.read_flow_runs()] == [phase]

    run.until(is_shown, f"the flow to show {phase}", attach=False)


def task_runs() -> list[TaskRun]:
    """All of them, in the order in which they were begun."""
    found: list[TaskRun] = []
    with get_client(sync_client=True) as client:
        while page := client.read_task_runs(offset=len(found), limit=200):
            found += page
    return sorted(found, key=lambda task: UUID(str(task.id)).int)


def state_of(run: FlowRun | TaskRun) -> State[object]:
    assert run.state is not None
    return run.state


def phases(flow_run: FlowRun) -> list[str]:
    with get_client(sync_client=True) as client:
        names = [s.name for s in client.read_flow_run_states(flow_run.id)]
    return [name for name in names if name not in ("Pending", "Running")]


def named(tasks: list[TaskRun]) -> list[tuple[str, str]]:
    return [(task.name, state_of(task).name) for task in tasks]
