"""``ensure``: where a step stands, judged from the run directory alone.

Idempotent from any number of callers and hosts, and it works when no session lives: nothing is
remembered between calls but when something was last seen to move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from runtime.clock import Clock, SystemClock
from runtime.errors import RetryBy, WaitTimeout
from runtime.rundir import history, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.claims import Pending, pending
from runtime.rundir.control import Control
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Watch
from runtime.rundir.presence import Presence
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EndRecord, Record
from runtime.rundir.workflow import Workflow
from runtime.session.answers import Answer, Done, Ended, Held, Lost, Rewound, Running
from runtime.session.evidence import receipt_of
from runtime.session.steps import Step

MAX_RESTARTS = 3
"""Epochs that may begin without a person, and without a commit between them."""


def ensure(
    root: RunRoot | Path | str,
    step: Step | str,
    *,
    timeout_s: float = 20.0,
    poll_s: float = 0.5,
    deadline_s: float | None = None,
) -> Answer:
    """Wait a while for a step and say where it stands. Every poll counts as being attached.

    Args:
        root: the output root.
        step: the step; from ``plan_steps`` it also knows what the caller has seen committed.
        timeout_s: answer ``Running`` after this at the latest.
        poll_s: between looks.
        deadline_s: longest time without progress of any kind; None for no deadline.

    Raises:
        WaitTimeout: if nothing moved for ``deadline_s``.
        ChainUnreadable: if history is damaged.
    """
    path = root.path if isinstance(root, RunRoot) else Path(root).absolute()
    wanted = Step.parse(step) if isinstance(step, str) else step
    return _onlooker(path).ensure(wanted, timeout_s=timeout_s, poll_s=poll_s, deadline_s=deadline_s)


class Onlooker:
    """One process's standing look at one run. Thread-safe."""

    def __init__(
        self,
        root: RunRoot,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        here: HostBoot | None = None,
    ) -> None:
        """Start looking; the run need not exist yet."""
        self._root = root
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._here = here or HostBoot.here()
        self._chain = Chain(root)
        self._control = Control(root)
        self._presence = Presence(root, clock=self._clock, here=self._here)
        self._progress = Watch(self._clock, limit_s=0.0, again_s=0.0)
        self._pulse: tuple[float, Watch] | None = None
        self._lock = threading.Lock()

    def ensure(
        self,
        step: Step,
        *,
        timeout_s: float = 20.0,
        poll_s: float = 0.5,
        deadline_s: float | None = None,
    ) -> Answer:
        """See the function ``ensure``."""
        until = self._clock.monotonic() + timeout_s
        while True:
            answer = self.look(step)
            if not isinstance(answer, Running):
                return answer
            if deadline_s is not None and answer.idle_s > deadline_s:
                raise WaitTimeout(
                    f"{step}: nothing moved for {answer.idle_s:.0f} s (deadline {deadline_s:.0f} s)"
                    f" while it was: {answer.what}",
                    step=str(step),
                    idle_s=answer.idle_s,
                )
            if self._clock.monotonic() >= until:
                return answer
            self._sleep(poll_s)

    def look(self, step: Step) -> Answer:
        """Judge once, without waiting; renews the attachment."""
        with self._lock:
            if self._root.control.is_dir():
                # Whoever may only read the run is no less served for it.
                with suppress(OSError):
                    self._control.attach()
            return judge(step, self._see())

    def _see(self) -> Sight:
        records = self._chain.read()
        end = history.current_end(records)
        waiting = pending(self._root, records, self._here)
        gone = None if end else self._presence.gone(records)
        if gone is not None and (again := self._chain.read()) != records:
            # The owner left between our look at the chain and our look at its process.
            records, gone = again, None
        view = self._view(records)
        moved = (len(records), waiting.attempt.number if waiting else 0)
        if view is not None:
            moved = (*moved, view.progress.time, view.update, view.activity)
        self._progress.has_lapsed(moved)
        idle_s = max(self._progress.age_s, view.idle_s if view else 0.0)
        return Sight(
            root=self._root,
            records=records,
            view=view,
            gone=gone,
            waiting=waiting,
            idle_s=idle_s,
            is_stale=self._is_stale(view),
        )

    def _view(self, records: tuple[Record, ...]) -> Workflow | None:
        """The live session's view; None where it is another epoch's, missing or damaged."""
        view = workflow.read(self._root)
        epoch = history.newest_epoch(records)
        return view if view and epoch and view.epoch == epoch.epoch else None

    def _is_stale(self, view: Workflow | None) -> bool:
        if view is None:
            return False
        every_s = view.heartbeat.every_s
        if self._pulse is None or self._pulse[0] != every_s:
            self._pulse = (every_s, Watch(self._clock, limit_s=5 * every_s, again_s=every_s))
        return self._pulse[1].has_lapsed((view.epoch, view.heartbeat.count, view.heartbeat.time))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Everything one look saw."""

    root: RunRoot
    records: tuple[Record, ...]
    view: Workflow | None
    """The present epoch's, or None."""
    gone: str | None
    """Why the owner is gone, if it is."""
    waiting: Pending | None
    """A claimed attempt that has not owned the run yet."""
    idle_s: float
    is_stale: bool


def judge(step: Step, sight: Sight) -> Answer:
    """Where a step stands. Reads receipts; everything else is in ``sight``."""
    records = sight.records
    if (receipt := receipt_of(step, sight.root, records, sight.view)) is not None:
        return Done(receipt=receipt)
    end = history.current_end(records)
    if end is not None and end.state == "complete":
        return _ended(end, f"the run is complete without {step}")
    committed = history.committed_update(records)
    if 0 <= committed < step.after:
        return Rewound(to=committed)
    is_owned = history.newest_epoch(records) is not None and end is None and sight.gone is None
    # One that has ended without owning the run was turned away by the owner, who goes on.
    if sight.waiting is not None and not (sight.waiting.is_over and is_owned):
        return _waiting(sight, sight.waiting)
    if end is not None:
        return _after_end(end, records)
    if history.newest_epoch(records) is None:
        return _lost(records, "no attempt was started")
    if sight.gone is not None:
        return _restartable(records) or _lost(records, sight.gone)
    view = sight.view
    if view is not None and view.activity == "held" and view.failure is not None:
        return Held(failure=view.failure)
    return _running(sight, view.progress.what if view else "starting the session")


def _waiting(sight: Sight, waiting: Pending) -> Answer:
    number = waiting.attempt.number
    if waiting.is_over:
        log = waiting.attempt.guard_log
        reason = f"attempt {number} ended before it owned the run: see {log}"
        return Lost(reason=reason, attempt=number)
    return _running(sight, f"waiting for attempt {number} to own the run")


def _after_end(end: EndRecord, records: tuple[Record, ...]) -> Answer:
    failure = end.failure
    if failure is None or failure.retry is not RetryBy.TASK:
        return _ended(end, failure.message if failure else f"ended by {end.ended_by}")
    if history.is_deterministic(records, failure.fingerprint):
        return _ended(end, f"the same failure twice without a commit between: {failure.message}")
    return _restartable(records) or _lost(records, failure.message, failure)


def _lost(records: tuple[Record, ...], reason: str, failure: Failure | None = None) -> Lost:
    epoch = history.newest_epoch(records)
    return Lost(reason=reason, attempt=epoch.attempt if epoch else 0, failure=failure)


def _restartable(records: tuple[Record, ...]) -> Ended | None:
    """None if a new epoch may begin on its own, else why not."""
    restarts = history.restarts_since_commit(records)
    if restarts < MAX_RESTARTS:
        return None
    end = history.current_end(records)
    return Ended(
        state="failed",
        activity=None,
        ended_by=end.ended_by if end else "vanished",
        update=max(0, history.committed_update(records)),
        reason=f"{restarts} restarts without a commit between them",
        failure=end.failure if end else None,
    )


def _ended(end: EndRecord, reason: str) -> Ended:
    return Ended(
        state=end.state,
        activity=end.activity,
        ended_by=end.ended_by,
        update=end.update,
        reason=reason,
        failure=end.failure,
    )


def _running(sight: Sight, what: str) -> Running:
    return Running(
        what=what,
        idle_s=sight.idle_s,
        is_stale=sight.is_stale,
        committed=history.committed_update(sight.records),
        view=sight.view,
    )


@lru_cache(maxsize=32)
def _onlooker(path: Path) -> Onlooker:
    return Onlooker(RunRoot(path))
