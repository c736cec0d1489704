"""The flow is unnecessary for the run, and shows all of it to people."""

import contextlib
import contextvars
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Self

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterName,
    TaskRunFilterStartTime,
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
from runtime.session.status import COMPLETE
from tests.e2e.checks import assert_stopped, assert_whole
from tests.e2e.running import IDLE_S, Run

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
    """A flow in a thread of its own, with the settings of this one.

    As a context: whatever becomes of the test, its run is ended, and its thread with it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._found: list[State[str]] = []
        self._errors: list[BaseException] = []
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._go,), daemon=True)

    def __enter__(self) -> Self:
        self._began = datetime.now(UTC)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        until = time.monotonic() + IDLE_S
        while self._thread.is_alive():
            # Asked for again: the flow may have begun another epoch meanwhile.
            if self._run.root.control.is_dir():
                self._run.stop("now")
            self._thread.join(1.0)
            assert time.monotonic() < until, f"the flow does not end\n{self._run.log()}"

    def _go(self) -> None:
        try:
            self._found.append(train(self._run.file, list(self._run.sets), return_state=True))
        except BaseException as error:  # raised again by who asks for the end
            self._errors.append(error)

    def until_it_waits(self) -> None:
        """Until a task of it waits for a stretch of the run: from then on it starts no attempt."""
        waiting = TaskRunFilter(
            name=TaskRunFilterName(like_="train collections"),
            start_time=TaskRunFilterStartTime(after_=self._began),
        )
        with get_client(sync_client=True) as client:
            self._run.until(
                lambda: client.read_task_runs(task_run_filter=waiting), "the flow to wait"
            )

    def end(self) -> State[str]:
        """Wait for the end of the flow.

        Raises:
            BaseException: what the flow raised instead of a state.
        """
        self._thread.join()
        for error in self._errors:
            raise error
        return self._found[0]


def test_a_flow_shows_every_committed_step_of_an_undisturbed_run_and_its_artifacts(
    run: Run,
) -> None:
    with Following(run) as flow:
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


def test_a_run_is_left_stopped_and_lost_by_those_who_follow_it_and_comes_out_whole(
    make_run: Callable[..., Run], environment: dict[str, str]
) -> None:
    run = make_run(
        "core.max_updates=10000",
        "data.epochs=200",
        "checkpoint.every_updates=20",
        "evaluation.every_updates=10000",
    )
    with command(run, environment):  # and killed: that kills no run
        run.until_committed(20)
    assert run.role("guard")
    with Following(run) as flow:
        flow.until_it_waits()
        run.stop("stop")
        state = flow.end()
    assert (state.type.value, state.name) == ("CANCELLED", "Stopped")
    assert_stopped(run, "stop", "stopped")
    assert run.epoch == 1

    stopped_at = run.end.update
    with Following(run) as flow:
        run.until_epoch(2)
        run.until_committed(stopped_at + 20)
        for role in ("guard", "session"):
            for process in run.role(role):
                process.kill()
        run.until_epoch(3)  # begun by the retry of the task that waited
        with command(run, environment) as beside:
            beside.says(f"attached: attempt {run.attempt} ")
            run.until_committed(history.committed_update(run.records) + 20)
            run.stop("final")
            assert beside.end() == COMPLETE, beside.said
        state = flow.end()
    assert (state.type.value, state.name) == ("COMPLETED", "Complete")
    _, _, retried = shown(state)
    assert list(retried.values()) == ["2"], retried
    assert run.until_ended().ended_by == "stop_final"
    assert run.epoch == 3
    assert_whole(run, updates=run.end.update)


class Command:
    """``milepost run`` in a process of its own."""

    def __init__(self, run: Run, environment: dict[str, str]) -> None:
        self._run = run
        argv = [sys.executable, "-m", "flows.cli", "run", str(run.file)]
        argv += [f"--set={text}" for text in run.sets]
        self._folder = run.file.parent / f"command-{uuid.uuid4().hex}"
        self._folder.mkdir()
        with (self._folder / "out").open("wb") as out, (self._folder / "err").open("wb") as err:
            self.process = subprocess.Popen(argv, env=environment, stdout=out, stderr=err)

    @property
    def said(self) -> str:
        """What it wrote on standard output."""
        return (self._folder / "out").read_text()

    def says(self, text: str) -> None:
        """Wait until it has said something."""
        self._run.until(lambda: text in self.said or self.process.poll() is not None, text)
        assert text in self.said, self.said + (self._folder / "err").read_text()

    def end(self) -> int:
        """Wait for its own end."""
        self._run.until(lambda: self.process.poll() is not None, "the command to end")
        return self.process.wait()


@contextlib.contextmanager
def command(run: Run, environment: dict[str, str]) -> Iterator[Command]:
    """One, killed at the end of the block if it still runs."""
    started = Command(run, environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
