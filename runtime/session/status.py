"""Where a run stands, judged from its directory alone; the answer of ``milepost status``.

Unlike ``ensure`` it does not count as being attached, and it looks for seconds at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.clock import Clock, SystemClock
from runtime.errors import StoreError
from runtime.rundir import history, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.claims import Pending, pending, read_claim
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Mark
from runtime.rundir.presence import Presence
from runtime.rundir.processes import HostBoot, ProcessRegistry, is_alive
from runtime.rundir.records import Activity, EpochRecord, Record, WorkflowState
from runtime.rundir.workflow import Counts, Workflow, count_seen
from runtime.session.completion import Row, completion_rows, expected_counts

State = WorkflowState | Literal["unknown"]

COMPLETE = 0
RUNNING = 3
FAILED = 4
OUTSTANDING = 5
STALE = 6
RESUMABLE = 7
"""Stopped, held or parked."""

_POLL_S = 0.2
_BEATS = 5
"""Heartbeats that may be missed before a view is called stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStanding:
    """The newest process of one role on one host."""

    role: str
    host: str
    pid: int
    alive: bool | None
    """None: it is on another host, or of another boot, and cannot be looked at from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One look at a run."""

    run: str
    root: RunRoot
    state: State
    activity: Activity | None
    stale: str | None
    """Why nobody seems to work on a run that is not over; None while it is fresh, or over."""
    attempt: int
    epoch: int
    update: int
    expected: Counts
    seen: Counts
    outstanding: tuple[str, ...]
    last_checkpoint: int | None
    ended_by: str | None
    failure: Failure | None
    next_check: str | None
    """Where a person looks next; None where there is nothing to look at."""
    training_digest: str
    spec_digest: str
    step: str | None
    doing: str | None
    """The last thing that moved."""
    rows: tuple[Row, ...]
    processes: tuple[ProcessStanding, ...]

    @property
    def exit_code(self) -> int:
        """Exit status of ``milepost status``."""
        if self.state == "complete":
            return OUTSTANDING if self.outstanding else COMPLETE
        if self.stale is not None or self.state == "unknown":
            return STALE
        if self.state == "failed":
            return FAILED
        return RESUMABLE if self.activity in ("held", "parked", "stopped") else RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one look saw, before anything is concluded."""

    root: RunRoot
    records: tuple[Record, ...]
    view: Workflow
    """As the file says, or rebuilt where the file says nothing of the newest epoch."""
    waiting: Pending | None
    """A claimed attempt that has not owned the run yet."""
    stale: str | None


def look(
    root: RunRoot,
    *,
    clock: Clock | None = None,
    here: HostBoot | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Status:
    """Look at a run.

    Takes as long as five heartbeats where the owner is on another host, or gives no sign of life.

    Args:
        root: the run; a root without a run in it is ``unknown``.
        clock: of this process.
        here: this host and boot.
        sleep: waits between looks.

    Raises:
        ChainUnreadable: if history is damaged.
        OSError: if the root cannot be read from here; see ``unreadable``.
    """
    clock = clock or SystemClock()
    here = here or HostBoot.here()
    chain = Chain(root)
    records = chain.read()
    stale = _owner_stale(root, records, clock=clock, here=here, sleep=sleep)
    if stale is not None and (again := chain.read()) != records:
        # It ended, or changed hands, between our looks.
        records, stale = again, None
    waiting = pending(root, records, here)
    is_owned = history.newest_epoch(records) is not None and history.current_end(records) is None
    if waiting is not None and waiting.is_over and is_owned and stale is None:
        waiting = None  # the owner turned it away, and goes on
    if waiting is not None and not waiting.is_over:
        stale = None
    elif waiting is not None and not history.is_complete(records):
        log = waiting.attempt.guard_log
        stale = f"attempt {waiting.attempt.number} ended before it owned the run: see {log}"
    view = workflow.current(root, records, now=clock.time())
    return conclude(
        Sight(root=root, records=records, view=view, waiting=waiting, stale=stale), here=here
    )


def conclude(sight: Sight, *, here: HostBoot) -> Status:
    """What a look means. Reads receipts and evidence files."""
    root, records, view = sight.root, sight.records, sight.view
    state, activity, attempt = _state(sight)
    processes = _processes(root, attempt, here)
    expected, seen = (
        expected_counts(root, records, view),
        count_seen(root, records, update=view.update),
    )
    # The guard wrote the end record and is about to leave: it proves the exits, it is none of them.
    left = tuple(
        f"{p.role} {p.pid} on {p.host}" for p in processes if p.alive and p.role != "guard"
    )
    rows = completion_rows(root, records, view, expected=expected, seen=seen, left=left)
    outstanding = view.outstanding
    if state == "complete":
        outstanding = tuple(name for row in rows for name in row.missing)
    failure = view.failure if activity in ("held", "parked") or state == "failed" else None
    return Status(
        run=view.run,
        root=root,
        state=state,
        activity=activity,
        stale=sight.stale,
        attempt=attempt,
        epoch=view.epoch,
        update=view.update,
        expected=expected,
        seen=seen,
        outstanding=outstanding,
        last_checkpoint=view.last_checkpoint,
        ended_by=view.ended_by,
        failure=failure,
        next_check=_next_check(root, state, sight.stale, failure, outstanding),
        training_digest=view.training_digest,
        spec_digest=_spec_digest(root, attempt),
        step=view.step,
        doing=view.progress.what,
        rows=rows,
        processes=processes,
    )


def unreadable(root: RunRoot, reason: str) -> Status:
    """The status of a root that cannot be read from this host: unknown, row by row."""
    rows = tuple(
        Row(name=name, is_filled=False, found=f"cannot be read from this host: {reason}")
        for name in (
            "exits",
            "launch receipt",
            "state",
            "counts",
            "audit files",
            "weights, engines",
        )
    )
    return Status(
        run=root.path.name,
        root=root,
        state="unknown",
        activity=None,
        stale=reason,
        attempt=0,
        epoch=0,
        update=0,
        expected=Counts(),
        seen=Counts(),
        outstanding=(),
        last_checkpoint=None,
        ended_by=None,
        failure=None,
        next_check=f"{root.path}: {reason}",
        training_digest="",
        spec_digest="",
        step=None,
        doing=None,
        rows=rows,
        processes=(),
    )


def _state(sight: Sight) -> tuple[State, Activity | None, int]:
    view, waiting = sight.view, sight.waiting
    if history.is_complete(sight.records):
        return "complete", None, view.attempt
    if waiting is not None and not waiting.is_over:
        # The newest attempt is about to own the run, however the one before ended.
        has_history = history.newest_commit(sight.records) is not None
        state: State = "training" if has_history else "preparing"
        return state, "resuming" if has_history else "running", waiting.attempt.number
    if history.newest_epoch(sight.records) is None and waiting is None:
        return "unknown", None, view.attempt
    number = waiting.attempt.number if waiting else view.attempt
    return view.state, view.activity, number


def _owner_stale(
    root: RunRoot,
    records: tuple[Record, ...],
    *,
    clock: Clock,
    here: HostBoot,
    sleep: Callable[[float], None],
) -> str | None:
    """Why the owner of a run that is not over seems gone or stuck; None where it is neither."""
    epoch = history.newest_epoch(records)
    if epoch is None or history.current_end(records) is not None:
        return None
    gone = Presence(root, clock=clock, here=here).gone(records)
    if gone is not None:
        return gone
    first = _sign(root, epoch)
    if _is_fresh(root, epoch, clock, here):
        return None
    view = workflow.read(root)
    every_s = view.heartbeat.every_s if view is not None else workflow.HEARTBEAT_S
    until = clock.monotonic() + _BEATS * every_s
    while clock.monotonic() < until:
        sleep(_POLL_S)
        if _sign(root, epoch) != first:
            return None
        if (gone := Presence(root, clock=clock, here=here).gone(records)) is not None:
            return gone
    return f"no sign of life of attempt {epoch.attempt} for {_BEATS * every_s:.0f} s"


def _is_fresh(root: RunRoot, epoch: EpochRecord, clock: Clock, here: HostBoot) -> bool:
    """Whether one look proves life: on one host the writer's clock is ours."""
    if HostBoot(epoch.host, epoch.boot_id) != here:
        return False
    view = workflow.read(root)
    if view is None or view.epoch != epoch.epoch or view.heartbeat.pid == epoch.pid:
        return True  # the guard lives, and its session has not spoken yet
    return 0 <= clock.time() - view.heartbeat.time <= _BEATS * view.heartbeat.every_s


def _sign(root: RunRoot, epoch: EpochRecord) -> object:
    """Changes while somebody lives: the heartbeat; before the first one, the lease."""
    view = workflow.read(root)
    if view is not None and view.epoch == epoch.epoch and view.heartbeat.pid != epoch.pid:
        return view.heartbeat.count, view.heartbeat.time
    return Mark.of(root.lease)


def _processes(root: RunRoot, attempt: int, here: HostBoot) -> tuple[ProcessStanding, ...]:
    if attempt < 1:
        return ()
    newest = {
        (e.host, e.role): e for e in ProcessRegistry(root.attempt(attempt).processes).entries()
    }
    return tuple(
        ProcessStanding(
            role=entry.role,
            host=entry.host,
            pid=entry.pid,
            alive=None
            if entry.where != here
            else entry.started is not None and is_alive(entry.pid, entry.started),
        )
        for entry in newest.values()
    )


def _next_check(
    root: RunRoot,
    state: State,
    stale: str | None,
    failure: Failure | None,
    outstanding: tuple[str, ...],
) -> str | None:
    if state == "complete":
        return f"outstanding: {', '.join(outstanding)}" if outstanding else None
    if stale is not None:
        return stale
    if failure is not None:
        return failure.next_check
    if state == "unknown":
        return f"no attempt was started in {root.path}"
    return None


def _spec_digest(root: RunRoot, attempt: int) -> str:
    try:
        return read_claim(root.attempt(attempt)).spec_digest if attempt >= 1 else ""
    except (StoreError, OSError):
        return ""
