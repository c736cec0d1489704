"""The flow is unnecessary for the run, and shows all of it to people."""

import contextlib
import contextvars
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
from runtime.data.collections import read_collection
from runtime.errors import ConfigError
from runtime.rundir import history
from tests.e2e.checks import assert_stopped, assert_whole
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


class Following:
    """A flow in a thread of its own, with the settings of this one."""

    def __init__(self, run: Run) -> None:
        self._found: list[State[str]] = []
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._go, run))
        self._thread.start()

    def _go(self, run: Run) -> None:
        self._found.append(train(run.file, list(run.sets), return_state=True))

    def end(self) -> State[str]:
        self._thread.join()
        return self._found[0]


def test_a_flow_shows_every_committed_step_of_an_undisturbed_run_and_its_artifacts(
    run: Run,
) -> None:
    flow = Following(run)
    run.until(lambda: run.attempt == 1, "the flow to have started it")
    assert run.start().how == "attached"
    with pytest.raises(ConfigError, match=r"core\.lr: 0\.001 -> 0\.5"):
        run.start("core.lr=0.5")
    state = flow.end()
    assert (state.type.value, state.name) == ("COMPLETED", "Complete")
    assert_all_of_it_is_shown(run, state)

    assert run.until_ended().ended_by == "max_updates"
    assert run.epoch == 1
    assert_whole(run, updates=8)
    assert [c.update for c in run.commits] == [0, 2, 4, 6, 8]
    assert sorted(p.name for p in run.root.rollouts.glob("*.parquet")) == [
        f"{number:06d}-e1.parquet" for number in range(1, 9)
    ]
    assert_evaluation_resampled_nothing(run)
    assert_export_loads(run)

    # Over a complete run nothing is started, and a second flow ends as complete.
    before = run.records
    assert run.start().how == "complete"
    again = train(run.file, [], return_state=True)
    assert again.name == "Complete"
    assert run.records == before


def assert_all_of_it_is_shown(run: Run, state: State[str]) -> None:
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


def assert_evaluation_resampled_nothing(run: Run) -> None:
    """Shared evaluation under refresh: what waited at the gate goes on as it was."""
    paused = run.events("generation.paused")
    assert [event["reason"] for event in paused] == ["evaluation"] * 2
    assert len(run.events("generation.resumed")) == 2
    assert run.ledger().requeued == 0
    for path in run.root.rollouts.glob("*.parquet"):
        assert {group.attempt for group in read_collection(path).groups} == {1}


def assert_export_loads(run: Run) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.root.export)
    trained = AutoModelForCausalLM.from_pretrained(run.root.export, dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(run.initial_model, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("reverse: abcd")])
    with torch.inference_mode():
        gap = (trained(ids).logits - initial(ids).logits).abs().max()
    assert gap > 1e-3  # eight updates were made


def test_a_run_is_lost_stopped_and_left_by_those_who_follow_it_and_comes_out_whole(
    make_run: Callable[..., Run], environment: dict[str, str]
) -> None:
    run = make_run(
        "core.max_updates=10000",
        "data.epochs=200",
        "checkpoint.every_updates=20",
        "evaluation.every_updates=10000",
    )
    flow = Following(run)
    run.until_committed(20)
    for role in ("guard", "session"):
        for process in run.role(role):
            process.kill()
    run.until_epoch(2)  # begun by the retry of the task that waited
    run.until_committed(history.committed_update(run.records) + 20)
    run.stop("stop")
    state = flow.end()
    assert (state.type.value, state.name) == ("CANCELLED", "Stopped")
    _, _, retried = shown(state)
    assert list(retried.values()) == ["2"], retried
    assert_stopped(run, "stop", "stopped")
    assert run.epoch == 2

    assert_killing_the_command_kills_no_run(run, environment)
    assert run.until_ended().ended_by == "stop_final"
    assert run.epoch == 3
    assert_whole(run, updates=run.end.update)


def assert_killing_the_command_kills_no_run(run: Run, environment: dict[str, str]) -> None:
    """And the next one attaches, and follows it to its end."""
    command = [sys.executable, "-m", "flows.cli", "run", str(run.file)]
    command += [f"--set={text}" for text in run.sets]
    quiet, stopped_at, epoch = subprocess.DEVNULL, run.end.update, run.epoch
    first = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    try:
        run.until_epoch(epoch + 1)
        run.until_committed(stopped_at + 20)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert run.role("guard")
    second = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with second:
        assert second.stdout is not None
        assert f"attached: attempt {run.attempt} " in second.stdout.readline()
        run.stop("final")
        said = second.stdout.read()
    assert second.returncode == 0, said
