"""Writing a won attempt down: the run file, the plan and the guard's orders, once and for all."""

from __future__ import annotations

from configs.plan import Plan
from configs.run import RunSpec
from runtime.rundir import atomic
from runtime.rundir.attempt import AttemptFile
from runtime.rundir.filesystem import is_shared
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.lease import LOCAL_LEASE_S, SHARED_LEASE_S
from runtime.rundir.workflow import Counts


def freeze(attempt: AttemptDir, spec_json: str, plan_json: str, order: AttemptFile) -> None:
    """Write the files of an attempt that this process has claimed. Idempotent for equal content.

    Raises:
        DiskFull: if there was no space.
    """
    root = attempt.root
    for path, data in (
        (attempt.run, spec_json.encode()),
        (attempt.plan, plan_json.encode()),
        (attempt.attempt, order.encode()),
        (root.run, spec_json.encode()),
        (root.plan, plan_json.encode()),
    ):
        atomic.write_bytes(path, data)


def lease_for(root: RunRoot, *, is_remote: bool) -> float:
    """Lease of a first attempt in seconds; later ones take what chain/0 says.

    Args:
        root: the run.
        is_remote: it runs on other hosts, whose view of the file system lags.
    """
    return SHARED_LEASE_S if is_remote or is_shared(root.path) else LOCAL_LEASE_S


def expected_counts(spec: RunSpec, plan: Plan) -> Counts:
    """What an undisturbed run makes; zeros where only the data's end decides."""
    schedule = plan.schedule
    return Counts(
        updates=schedule.updates or 0,
        checkpoints=max(0, (schedule.num_commits or 0) - 1),
        evaluations=(schedule.num_evaluations or 0) * len(spec.evaluation.sets),
        exports=int(schedule.export),
    )
