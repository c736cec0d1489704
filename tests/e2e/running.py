"""A small run of the real thing: guard, Ray, embedded engine, trainer; and what tests ask of it."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from configs.load import load_run
from runtime.checkpoints.resume import find_restorable
from runtime.data.history import LedgerReport, read_history
from runtime.data.segments import LedgerSegment
from runtime.drill.processes import processes_of, role_of
from runtime.launch.attempts import Launch
from runtime.launch.start import start_run
from runtime.rundir import enter, history
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control, StopMode
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import kill_exactly
from runtime.rundir.records import CommitRecord, EndRecord, Record
from runtime.rundir.workflow import Workflow, read
from runtime.session.answers import Done, Ended, Held, Lost, Running
from runtime.session.ensure import ensure
from runtime.session.preparing import run_preparation

IDLE_S = 240.0
"""Nothing moved for so long: hung, however busy the machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run file with its output root."""

    file: Path
    made: Path
    """Folder of the model and the prompts, shared by all runs."""
    sets: tuple[str, ...] = ()

    @property
    def root(self) -> RunRoot:
        return RunRoot(self.file.parent / "run")

    @property
    def initial_model(self) -> Path:
        return self.made / "model"

    @property
    def train_file(self) -> Path:
        return self.made / "train.jsonl"

    def start(self, *more: str, lost_attempt: int | None = None) -> Launch:
        """Start or attach; returns once the attempt owns the run."""
        loaded = load_run(self.file, (*self.sets, *more))
        launch = start_run(loaded, reason="test", lost_attempt=lost_attempt)
        self.until(lambda: self.attempt >= launch.attempt, f"attempt {launch.attempt} to own it")
        return launch

    def start_prepared(self, *more: str) -> Launch:
        """Start a fresh run for which this process has prepared model and data.

        It has loaded what that takes, which a process of the session's own must load anew; that
        one is at work in the runs that a flow starts.
        """
        run_preparation(load_run(self.file, (*self.sets, *more)).spec, self.root)
        return self.start(*more)

    # -- what is there --------------------------------------------------------------------------

    @property
    def records(self) -> tuple[Record, ...]:
        return Chain(self.root).read()

    @property
    def epoch(self) -> int:
        newest = history.newest_epoch(self.records)
        return newest.epoch if newest else 0

    @property
    def attempt(self) -> int:
        newest = history.newest_epoch(self.records)
        return newest.attempt if newest else 0

    @property
    def view(self) -> Workflow:
        found = read(self.root)
        assert found is not None
        return found

    @property
    def commits(self) -> tuple[CommitRecord, ...]:
        return history.standing_commits(self.records)

    @property
    def end(self) -> EndRecord:
        end = history.current_end(self.records)
        assert end is not None, self.log()
        return end

    def segments(self) -> tuple[LedgerSegment, ...]:
        found = find_restorable(self.root, self.records)
        assert found is not None
        assert found.history_gap is None
        return found.segments

    def ledger(self) -> LedgerReport:
        return read_history(self.segments())

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rows of ``pipeline_lifecycle.jsonl`` with this event."""
        path = self.root.pipeline_lifecycle
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if row["event"] == name]

    def log(self) -> str:
        folder = self.root.attempt(self.attempt)
        logs = [folder.guard_log, folder.session_log, *folder.path.glob("*.jsonl")]
        return "\n".join(
            f"--- {path}\n{path.read_text(errors='replace')[-3000:]}"
            for path in logs
            if path.exists()
        )

    # -- waiting --------------------------------------------------------------------------------

    def until(self, is_so: Callable[[], object], what: str, *, attach: bool = True) -> None:
        """Wait for something, for as long as anything moves; attached, as a flow would be."""
        moved, since, looked = self._mark(), time.monotonic(), time.monotonic()
        while not is_so():
            if attach and self.root.control.is_dir():
                Control(self.root).attach()
            # A look at all processes costs as much as many polls.
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                if (mark := self._mark()) != moved:
                    moved, since = mark, looked
                assert looked - since < IDLE_S, f"hung, waiting for {what}\n{self.log()}"
            time.sleep(0.05)

    def until_committed(self, update: int) -> None:
        """Wait for a standing commit at or after ``update``."""
        self.until(
            lambda: history.committed_update(self.records) >= update or self._is_over(),
            f"a commit of update {update}",
        )
        assert history.committed_update(self.records) >= update, self.log()

    def until_epoch(self, epoch: int) -> None:
        """Wait for an owner of this epoch."""
        self.until(lambda: self.epoch >= epoch, f"epoch {epoch}")

    def until_ended(self, *, attach: bool = True) -> EndRecord:
        """Wait for the newest epoch's end record, and for its guard to be gone."""
        self.until(self._is_over, "the end", attach=attach)
        self.until(lambda: not self.processes(), "all processes to leave", attach=attach)
        return self.end

    def until_held(self) -> Held:
        """Wait until a step is held; what holds it."""
        found: list[Held] = []

        def is_held() -> bool:
            answer = ensure(self.root, "finish", timeout_s=0.0)
            found.extend([answer] if isinstance(answer, Held) else [])
            return bool(found)

        self.until(is_held, "a step to be held")
        return found[0]

    def retry(self, held: Held) -> None:
        """Ask for one more try of a held step, and wait until it is begun."""
        Control(self.root).request_retry(held.failure.id)
        left = self.root.control / f"retry-{held.failure.id}"
        self.until(lambda: not left.exists(), "the session to try again")
        self.until(lambda: self.view.failure is None, "the step to go through")

    def finish(self) -> None:
        """Wait for the run's end as the flow's task does: a lost run gets a new epoch."""
        while True:
            match ensure(self.root, "finish", timeout_s=20.0, poll_s=0.1, deadline_s=IDLE_S):
                case Done():
                    break
                case Lost() as lost:
                    self.start(lost_attempt=lost.attempt)
                case Running():
                    pass
                case Held() | Ended() as other:
                    raise AssertionError(f"{other}\n{self.log()}")
                case other:
                    raise AssertionError(other)
        self.until(lambda: not self.processes(), "all processes to leave")

    def stop(self, mode: StopMode) -> None:
        Control(self.root).request_stop(mode, epoch=self.epoch, by="test", time=time.time())

    def _is_over(self) -> bool:
        return history.current_end(self.records) is not None

    def _mark(self) -> object:
        view = read(self.root) if self.root.path.exists() else None
        records = len(list(self.root.chain.glob("*.json"))) if self.root.chain.exists() else 0
        return (
            records,
            view and (view.progress.time, view.update, view.epoch),
            len(self.processes()),
        )

    # -- processes ------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every living process of this run: named by its command line or its environment."""
        return list(processes_of(self.root.attempts))

    def role(self, role: str) -> list[psutil.Process]:
        """Processes of the present attempt that play a role."""
        return [p for p in self.processes() if role_of(p) == role]

    def kill(self, role: str) -> None:
        """kill -9 of one process of a role, once it is there."""
        (process, *_) = self.until_there(role)
        started = enter.started(process.pid)
        assert started is not None
        assert kill_exactly(process.pid, started, signal.SIGKILL)

    def until_there(self, role: str, count: int = 1) -> list[psutil.Process]:
        """Wait for so many processes of a role."""
        found: list[psutil.Process] = []

        def are_there() -> bool:
            found[:] = self.role(role)
            return len(found) >= count

        self.until(are_there, f"{count} of {role}")
        return found
