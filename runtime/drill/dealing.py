"""How each blow of the catalogue is dealt to a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

from runtime.drill.catalogue import Blow
from runtime.drill.drilled import DrilledRun
from runtime.drill.job import LEASE_S
from runtime.drill.observing import Tail
from runtime.drill.processes import listening, processes_of, role_of
from runtime.faults.plan import Kind
from runtime.policy import PolicyId
from runtime.rundir import enter, history
from runtime.rundir.processes import kill_exactly

PATIENCE_S = 20.0
_FREEZE = 1.7
"""Leases that a freeze lasts."""
_WINDOW_S = 3.0
"""Between a flow's claim of an attempt and its link: so far apart may two of them come."""
_LATE_S = 5.0
"""By which commits come late, so that an evaluation overtakes one."""
_LATER_S = 2.0
"""By which the evaluations after it come late, so that their commit stands before them."""
_OVERTAKING_S = 60.0


def strike(run: DrilledRun, blow: Blow, *, patience_s: float = PATIENCE_S) -> float | None:
    """Deal a blow; when it landed, or None if there was nobody to meet."""
    run.ports |= listening(list(processes_of(run.job.root.attempts)))
    match blow.how:
        case "signal":
            return _signal(run, blow)
        case "freeze":
            return _freeze(run, blow)
        case "point":
            return _point(run, blow, patience_s)
        case "two flows":
            return _two_flows(run, blow, patience_s)
        case "rewind":
            return _rewind(run, blow)


def _signal(run: DrilledRun, blow: Blow) -> float | None:
    number = signal.SIGKILL if blow.signal == "kill" else signal.SIGTERM
    for pid, started in _victims(run, blow.role):
        at = time.time()
        if kill_exactly(pid, started, number):
            return at
    return None


def _freeze(run: DrilledRun, blow: Blow) -> float | None:
    victims = _victims(run, blow.role)
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


def _two_flows(run: DrilledRun, blow: Blow, patience_s: float) -> float | None:
    """The run is lost, and two flows take it up: neither knows of the other at the point."""
    both = {run.attendant, run.attend_twice()}
    said = Tail(run.job.attended)
    heard: set[object] = set()

    def have_said() -> bool:
        rows = (row for row in said.rows() if row["saw"] in ("started", "attached"))
        heard.update(row["pid"] for row in rows)
        return both <= heard

    try:
        _wait(run, have_said, patience_s, "the second flow")
        if not both <= heard:
            return None
        fault = run.arm(blow.point, Kind.SLOW, times=blow.times, seconds=_WINDOW_S)
        heard.clear()
        if _signal(run, blow) is None:
            return None
        _wait(run, have_said, patience_s, "two flows to take the run up")
        fired = run.plan.fired(fault.id)
        # One that came late found the other's attempt alive, and had nothing to claim.
        return fired[0].time if have_said() and len(fired) == blow.times else None
    finally:
        run.disarm()
        run.attend_once()


def _rewind(run: DrilledRun, blow: Blow) -> float | None:
    """An update was evaluated, and the session dies before that update is committed."""
    run.arm("commit.record", Kind.SLOW, times=1000, seconds=_LATE_S)
    _wait(run, lambda: _overtaken(run), _OVERTAKING_S, "an evaluation ahead of its commit")
    at = _signal(run, blow) if _overtaken(run) else None
    if at is None:
        run.disarm()
        return None
    # So that whoever comes to that update again finds it committed already.
    run.arm("session.evaluate", Kind.SLOW, times=2, seconds=_LATER_S)
    run.observer.look()
    return at


def _overtaken(run: DrilledRun) -> bool:
    """The present epoch has evaluated an update that it has not committed yet."""
    records = run.observer.records
    epoch, committed = history.newest_epoch(records), history.committed_update(records)
    for folder in run.job.root.evaluations.glob("e*.u*"):
        policy = PolicyId.parse(folder.name)
        if epoch and policy.epoch == epoch.epoch and policy.update > committed:
            results = (path.read_bytes() for path in folder.glob("*/tries/*/result.json"))
            if any(json.loads(data).get("state") == "succeeded" for data in results):
                return True
    return False


def _wait(run: DrilledRun, is_so: Callable[[], bool], patience_s: float, what: str) -> None:
    """Wait for something that may never come: not for ever, and not past the run's end."""
    until = time.monotonic() + patience_s
    run.until(
        lambda: is_so() or time.monotonic() >= until or run.observer.is_complete(),
        what,
    )


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
