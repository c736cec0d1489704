"""The workflow view: where a run stands, for people and flows. It can be rebuilt from the chain."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from runtime.clock import Clock, SystemClock
from runtime.errors import ContractViolation
from runtime.policy import PolicyId
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.history import (
    committed_update,
    current_end,
    is_complete,
    is_standing,
    newest_epoch,
    standing_commits,
)
from runtime.rundir.layout import EXPORT_RECEIPT, RunRoot
from runtime.rundir.records import Activity, Record, WorkflowState

HEARTBEAT_S = 2.0

_SESSION_ONLY = ("step", "expected", "outstanding", "detail", "progress", "training_digest")
"""Fields that the chain does not know."""


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Counts(_View):
    """How many of each a run makes, or has made. Commit 0 and the initial model do not count."""

    updates: int = 0
    checkpoints: int = 0
    evaluations: int = 0
    exports: int = 0


class Heartbeat(_View):
    """A sign of life of the writer."""

    count: int
    """Grows with every write: staleness is whether it stands still, no clocks are compared."""
    time: float
    """Seconds since the Unix epoch by the writer's clock."""
    every_s: float
    host: str
    pid: int


class Progress(_View):
    """The last thing that moved."""

    time: float
    """By the writer's clock: only its distance from the heartbeat's time means something."""
    what: str


class Workflow(_View):
    """``workflow.json``."""

    schema_version: Literal[1] = 1
    run: str
    """The run's name."""
    state: WorkflowState
    activity: Activity | None = None
    """None when complete or failed."""
    since: float
    """When state or activity last changed, by the writer's clock."""
    attempt: int
    epoch: int
    """0 before the first epoch."""
    update: int
    """Last update made, committed or not."""
    step: str | None = None
    """What is being done, as ``runtime.session.steps`` writes it."""
    expected: Counts = Field(default_factory=Counts)
    seen: Counts = Field(default_factory=Counts)
    outstanding: tuple[str, ...] = ()
    """Required evaluations, exports and other evidence still missing."""
    last_checkpoint: int | None = None
    """Update of the newest commit."""
    ended_by: str | None = None
    failure: Failure | None = None
    training_digest: str = ""
    heartbeat: Heartbeat
    progress: Progress
    paths: dict[str, str] = Field(default_factory=dict)
    """Real paths of all artifacts by name."""
    detail: dict[str, JsonValue] = Field(default_factory=dict)
    """Numbers for people: reward, rates, commits delayed."""

    @property
    def idle_s(self) -> float:
        """Seconds from the last progress to the last sign of life, both by the writer's clock."""
        return max(0.0, self.heartbeat.time - self.progress.time)


class WorkflowFile:
    """Writes the view for one owner. Not thread-safe."""

    def __init__(self, root: RunRoot, *, epoch: int, clock: Clock | None = None) -> None:
        self._root = root
        self._epoch = epoch
        self._clock = clock or SystemClock()
        self._chain = Chain(root)
        self._count = 0
        self._last: Workflow | None = None

    def write(self, view: Workflow) -> Workflow:
        """Replace the view with a new heartbeat; ``since`` is kept while state and activity are.

        Returns:
            What was written.

        Raises:
            FencedError: if a newer owner exists.
            ContractViolation: if it says complete before the chain does.
            DiskFull: if there was no space; the old view stands, and nothing ends for it.
        """
        records = self._chain.check(self._epoch)
        if view.state == "complete" and not is_complete(records):
            raise ContractViolation("the view may say complete only after the chain does")
        now = self._clock.time()
        last = self._last
        is_same = last is not None and (last.state, last.activity) == (view.state, view.activity)
        self._count += 1
        placed = view.model_copy(
            update={
                "since": last.since if last is not None and is_same else view.since,
                "heartbeat": beat(self._count, now, every_s=view.heartbeat.every_s),
            }
        )
        write(self._root, placed)
        self._last = placed
        return placed


def write(root: RunRoot, view: Workflow) -> None:
    """Replace ``workflow.json`` in one step."""
    atomic.write_bytes(root.workflow, view.model_dump_json(indent=1).encode() + b"\n")


def beat(count: int, now: float, *, every_s: float = HEARTBEAT_S) -> Heartbeat:
    """A heartbeat of this process."""
    return Heartbeat(
        count=count, time=now, every_s=every_s, host=socket.gethostname(), pid=os.getpid()
    )


def read(root: RunRoot) -> Workflow | None:
    """The view; None where it is missing, damaged or of another version: then rebuild it."""
    data = atomic.read_bytes(root.workflow)
    if data is None:
        return None
    try:
        return Workflow.model_validate_json(data)
    except ValidationError:
        return None


def current(root: RunRoot, records: tuple[Record, ...], *, now: float) -> Workflow:
    """The view if it agrees with the chain, else a rebuilt one: what ``status`` shows.

    It disagrees when it is damaged, of an older epoch, or its guard died before the last view.

    Args:
        root: the run.
        records: the whole chain.
        now: seconds since the Unix epoch, for a rebuilt view.
    """
    view = read(root)
    epoch, end = newest_epoch(records), current_end(records)
    if view is None or epoch is None or view.epoch != epoch.epoch:
        return rebuild(root, records, now=now)
    if end is not None and (view.state, view.activity) != (end.state, end.activity):
        return rebuild(root, records, now=now, last=view)
    return view


def rebuild(
    root: RunRoot, records: tuple[Record, ...], *, now: float, last: Workflow | None = None
) -> Workflow:
    """The view as the chain and the files tell it.

    Args:
        root: the run.
        records: the whole chain.
        now: seconds since the Unix epoch, for heartbeat and progress of the rebuilt view.
        last: the session's last view of this epoch, for what only the session knew; None loses it.
    """
    epoch = newest_epoch(records)
    end = current_end(records)
    commits = standing_commits(records)
    committed = committed_update(records)
    newest = records[-1] if records else None
    attempt = epoch.attempt if epoch else max(root.attempt_numbers(), default=0)
    asked = _asked(root, attempt)
    state: WorkflowState = end.state if end else ("training" if commits else "preparing")
    update = max(committed, end.update if end else 0, 0)
    rebuilt = Workflow(
        run=str(asked.get("run") or root.path.name),
        state=state,
        activity=end.activity if end else "running",
        since=newest.time if newest else now,
        attempt=attempt,
        epoch=epoch.epoch if epoch else 0,
        update=update,
        step=end.failure.step if end and end.failure else None,
        expected=Counts.model_validate(asked.get("expected") or {}),
        seen=count_seen(root, records, update=update),
        last_checkpoint=committed if committed >= 0 else None,
        ended_by=end.ended_by if end else None,
        failure=end.failure if end else None,
        training_digest=str(asked.get("training_digest") or ""),
        heartbeat=beat(0, now),
        progress=Progress(time=newest.time if newest else now, what="rebuilt from the chain"),
        paths=root.artifacts(),
    )
    if last is None:
        return rebuilt
    return rebuilt.model_copy(update={name: getattr(last, name) for name in _SESSION_ONLY})


def count_seen(root: RunRoot, records: tuple[Record, ...], *, update: int) -> Counts:
    """What the files and the chain hold evidence of."""
    return Counts(
        updates=update,
        checkpoints=sum(commit.update > 0 for commit in standing_commits(records)),
        evaluations=len(_standing_evaluations(root, records)),
        exports=sum(1 for _ in root.path.glob(f"export*/{EXPORT_RECEIPT}")),
    )


def _standing_evaluations(root: RunRoot, records: tuple[Record, ...]) -> set[tuple[int, str]]:
    """(update, set) of every result whose policy belongs to history; once, whoever made it."""
    found: set[tuple[int, str]] = set()
    for folder in root.evaluations.glob("e*.u*/*"):
        try:
            policy = PolicyId.parse(folder.parent.name)
        except ValueError:
            continue
        if is_standing(records, policy) and _has_result(folder):
            found.add((policy.update, folder.name))
    return found


def _has_result(folder: Path) -> bool:
    """Whether a try of this evaluation succeeded; what it found is ``runtime.evaluation``'s."""
    results = map(atomic.read_bytes, folder.glob("tries/*/result.json"))
    return any(_fields(data).get("state") == "succeeded" for data in results)


def _asked(root: RunRoot, attempt: int) -> dict[str, object]:
    return _fields(atomic.read_bytes(root.attempt(attempt).attempt)) if attempt else {}


def _fields(data: bytes | None) -> dict[str, object]:
    """The object in a JSON file; empty where it is missing or damaged."""
    try:
        found: object = json.loads(data or b"{}")
    except ValueError:
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}
