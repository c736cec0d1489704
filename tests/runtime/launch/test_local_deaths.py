"""A local launcher is killed at each point on its way; the run comes out as if it never was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import faults
from runtime.drill.processes import processes_of
from runtime.faults import Fault, FaultPlan, Kind
from runtime.faults.points import POINTS
from runtime.launch.attempts import Launch
from runtime.launch.local import LocalLaunch
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EpochRecord
from runtime.session.answers import Done, Lost, Running
from runtime.session.ensure import ensure
from tests.runtime.launch.test_local import LIVE, SPEC
from tests.runtime.session.guards import QUICK_SESSION

pytestmark = pytest.mark.timeout(300)
ON_ITS_WAY = tuple(p.name for p in POINTS if p.where.startswith("runtime.launch.local:"))
OWNER = {"launch.claim": 1, "launch.started": 1}
"""The attempt that owns the run in the end; 2 where the first was left behind without a guard."""
PATIENCE_S = 240.0
LEASE_S = 60.0
"""No guard loses it on a machine that is busy; nobody waits for one that is dead."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRoot:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    return RunRoot.of(tmp_path / "run")


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path / "plan")


def start(root: RunRoot, lost_attempt: int | None = None) -> Launch:
    return LocalLaunch().start(
        root, SPEC, "t", run="t", lease_s=LEASE_S, session=QUICK_SESSION, lost_attempt=lost_attempt
    )


def killed(root: RunRoot, plan: FaultPlan) -> int:
    """A launcher in a fork of this process, whose plan is its own; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            faults.plan = plan
            start(root)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


def follow(root: RunRoot) -> None:
    """As the flow does: a lost attempt is followed by the next."""
    deadline = time.monotonic() + PATIENCE_S
    while not isinstance(answer := ensure(root, "finish", timeout_s=1.0, poll_s=0.02), Done):
        assert time.monotonic() < deadline, answer
        if isinstance(answer, Lost):
            start(root, answer.attempt)
        else:
            assert isinstance(answer, Running), answer


def test_the_points_are_those_of_the_way() -> None:
    assert ON_ITS_WAY == (
        "launch.freeze", "launch.spawn", "launch.record", "launch.go", "launch.started",
    )  # fmt: skip


@pytest.mark.parametrize("point", ["launch.claim", *ON_ITS_WAY])
@pytest.mark.parametrize("how", ["asked again", "followed"])
def test_one_guard_owns_the_run_wherever_its_launcher_dies(
    root: RunRoot, plan: FaultPlan, point: str, how: str
) -> None:
    root.create()
    plan.arm([Fault(id="death", point=point, kind=Kind.KILL)])
    assert killed(root, plan) == -signal.SIGKILL
    assert [fired.point for fired in plan.fired()] == [point]
    if how == "asked again":
        start(root)
    follow(root)
    records = Chain(root).read()
    owners = [record.attempt for record in records if isinstance(record, EpochRecord)]
    assert owners == [OWNER.get(point, 2)]
    assert history.is_complete(records)
    until(lambda: not list(processes_of(root.attempts)), "every process to leave")
    assert (start(root).how, root.attempt_numbers()) == ("complete", [*range(1, owners[0] + 1)])


@pytest.mark.parametrize("point", ON_ITS_WAY[:-1])
def test_a_full_disk_on_the_way_leaves_nothing_behind(
    root: RunRoot, plan: FaultPlan, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = LocalLaunch(guard=LIVE)
    plan.arm([Fault(id="full", point=point, kind=Kind.DISK_FULL)])
    monkeypatch.setattr(faults, "plan", plan)
    with pytest.raises(OSError, match="No space left"):
        launch.start(root, SPEC, "t", run="t")
    assert len(plan.fired("full")) == 1
    attempt = root.attempt(1)
    assert not attempt.claim.exists()
    assert not attempt.started.exists()
    assert list(processes_of(root.attempts)) == []
    follow_up = start(root)
    assert (follow_up.how, follow_up.attempt) == ("started", 1)
    follow(root)
    until(lambda: not list(processes_of(root.attempts)), "every process to leave")
