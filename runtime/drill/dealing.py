"""How each blow of the catalogue is dealt to a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from configs.schedule import evaluation_due
from runtime.drill.catalogue import Blow
from runtime.drill.drilled import DrilledRun
from runtime.drill.job import LEASE_S
from runtime.drill.observing import Tail
from runtime.drill.processes import listening, processes_of, role_of
from runtime.drill.promises import has_succeeded
from runtime.faults.plan import Kind
from runtime.policy import PolicyId
from runtime.rundir import enter, history
from runtime.rundir.processes import kill_exactly
from runtime.rundir.records import CommitRecord

PATIENCE_S = 20.0
_FREEZE = 1.7
"""Leases that a freeze lasts."""
_LOOK_S = 0.5
"""Between two looks for a process that is not there yet: each goes through all of the host's."""
_STORY_S = 120.0
"""For each step of a story of several; the card met nobody when it takes longer."""
_LATER_S = 2.0
"""By which evaluations after a rewind come late, so that their commit stands before them."""


def strike(run: DrilledRun, blow: Blow, *, patience_s: float = PATIENCE_S) -> float | None:
    """Deal a blow; when it landed, or None if there was nobody to meet."""
    run.ports |= listening(list(processes_of(run.job.root.attempts)))
    match blow.how:
        case "signal":
            return _signal(run, blow, patience_s)
        case "freeze":
            return _freeze(run, blow, patience_s)
        case "point":
            return _point(run, blow, patience_s)
        case "two flows":
            return _two_flows(run, blow)
        case "rewind":
            return _rewind(run, blow)


def _signal(run: DrilledRun, blow: Blow, patience_s: float) -> float | None:
    number = signal.SIGKILL if blow.signal == "kill" else signal.SIGTERM
    for pid, started in _awaited(run, blow.role, patience_s):
        at = time.time()
        if kill_exactly(pid, started, number):
            return at
    return None


def _freeze(run: DrilledRun, blow: Blow, patience_s: float) -> float | None:
    victims = _awaited(run, blow.role, patience_s)
    at = time.time()
    frozen = [v for v in victims if kill_exactly(*v, signal.SIGSTOP)]
    if not frozen:
        return None
    until = time.monotonic() + _FREEZE * LEASE_S
    # An attendant may begin the next epoch meanwhile, which ends whoever is frozen.
    run.until(lambda: time.monotonic() >= until or not any(_lives(v) for v in frozen), "the thaw")
    for victim in frozen:
        kill_exactly(*victim, signal.SIGCONT)
    return at


def _point(run: DrilledRun, blow: Blow, patience_s: float) -> float | None:
    fault = run.arm(blow.point, blow.kind, after=blow.after, times=blow.times, seconds=blow.seconds)
    if blow.provoke:
        for victim in _victims(run, blow.provoke)[:1]:
            kill_exactly(*victim, signal.SIGKILL)
    what = f"{blow.kind} at {blow.point}"
    _wait(run, lambda: bool(run.plan.fired(fault.id)), patience_s, what)
    fired = run.plan.fired(fault.id)
    if blow.kind is not Kind.CLOCK_JUMP or not fired:
        run.disarm()
    return fired[0].time if fired else None


def _two_flows(run: DrilledRun, blow: Blow) -> float | None:
    """The run is lost, and two flows take it up: neither knows of the other at the point."""
    both = {run.attendant, run.attend_twice()}
    said = Tail(run.job.attended)
    heard: set[object] = set()

    def have_said() -> bool:
        rows = (row for row in said.rows() if row["saw"] in ("started", "attached"))
        heard.update(row["pid"] for row in rows)
        return both <= heard

    try:
        _wait(run, have_said, _STORY_S, "the second flow")
        if not both <= heard:
            return None
        heard.clear()
        fault = run.arm(blow.point, Kind.HOLD, times=blow.times)
        if _signal(run, blow, 0.0) is None:
            return None

        def have_come() -> bool:
            """Whoever is to be held is, and whoever is not went past them."""
            have_said()
            fired = len(run.plan.fired(fault.id))
            return fired == blow.times and len(both & heard) == len(both) - fired

        _wait(run, have_come, _STORY_S, "two flows to come to the point")
        have_both_come = have_come()
        run.disarm()
        _wait(run, have_said, _STORY_S, "two flows to take the run up")
        # One that came late found the other's attempt alive, and had nothing to claim.
        is_so = have_both_come and have_said()
        return run.plan.fired(fault.id)[0].time if is_so else None
    finally:
        run.disarm()
        run.attend_once()


def _rewind(run: DrilledRun, blow: Blow) -> float | None:
    """An update was evaluated, and the session dies before that update is committed."""
    hold = _Hold(run)
    _wait(run, hold.is_overtaken, _STORY_S, "an evaluation ahead of its commit")
    at = _signal(run, blow, 0.0) if hold.is_overtaken() else None
    if at is None:
        run.disarm()
        return None
    # So that whoever comes to that update again finds it committed already.
    run.arm("session.evaluate", Kind.SLOW, times=2, seconds=_LATER_S)
    run.observer.look()
    return at


class _Hold:
    """Holds the record of a commit for as long as an evaluation may overtake it."""

    def __init__(self, run: DrilledRun) -> None:
        self._run = run
        self._spec = run.job.load().spec
        self._fault = run.arm("commit.record", Kind.HOLD)

    def is_overtaken(self) -> bool:
        """The update whose record is held was evaluated; lets a record go that none waits for."""
        fired = self._run.plan.fired(self._fault.id)
        if not fired:
            return False
        update = _unrecorded(self._run)
        is_held = enter.started(fired[0].pid) is not None
        if not is_held or update is None or not self._may_be_overtaken(update):
            self._fault = self._run.arm("commit.record", Kind.HOLD)
            return False
        return _overtaken(self._run)

    def _may_be_overtaken(self, update: int) -> bool:
        # The first one is there before anything is evaluated, the last one is waited for.
        is_between = 0 < update < self._run.job.updates
        return is_between and evaluation_due(self._spec, update)


def _unrecorded(run: DrilledRun) -> int | None:
    """The newest update of the present epoch whose commit is whole and has no record."""
    records = run.observer.records
    epoch = history.newest_epoch(records)
    if epoch is None:
        return None
    recorded = {record.folder for record in records if isinstance(record, CommitRecord)}
    there = run.job.root.checkpoints.glob(f"*-e{epoch.epoch}")
    names = [folder.name for folder in there if f"checkpoints/{folder.name}" not in recorded]
    return max((int(name.partition("-")[0]) for name in names), default=None)


def _overtaken(run: DrilledRun) -> bool:
    """The present epoch has evaluated an update that it has not committed yet."""
    records = run.observer.records
    epoch, committed = history.newest_epoch(records), history.committed_update(records)
    if epoch is None:
        return False
    for folder in run.job.root.evaluations.glob(f"e{epoch.epoch}.u*"):
        is_ahead = PolicyId.parse(folder.name).update > committed
        if is_ahead and any(map(has_succeeded, folder.glob("*/tries/*/result.json"))):
            return True
    return False


def _wait(run: DrilledRun, is_so: Callable[[], bool], patience_s: float, what: str) -> None:
    """Wait for something that may never come: not for ever, and not past the run's end."""
    until = time.monotonic() + patience_s
    run.until(
        lambda: is_so() or time.monotonic() >= until or run.observer.is_complete(),
        what,
    )


def _awaited(run: DrilledRun, role: str, patience_s: float) -> list[tuple[int, float]]:
    """Whom a blow meets, as soon as there is anybody: an epoch may be on its way up."""
    found: list[tuple[int, float]] = []
    looked_at = -_LOOK_S

    def are_there() -> bool:
        nonlocal found, looked_at
        if time.monotonic() - looked_at >= _LOOK_S:
            looked_at, found = time.monotonic(), _victims(run, role)
        return bool(found)

    _wait(run, are_there, patience_s, f"the {role}")
    return found


def _victims(run: DrilledRun, role: str) -> list[tuple[int, float]]:
    """(pid, start) of whom a blow meets."""
    if role == "flow":
        pids = [run.attendant]
    else:
        pids = [
            p.pid
            for p in processes_of(run.job.root.attempts)
            if role == "owner" or role_of(p) == role
        ]
    return [(pid, at) for pid in pids if (at := enter.started(pid)) is not None]


def _lives(victim: tuple[int, float]) -> bool:
    pid, started = victim
    return enter.started(pid) == started
