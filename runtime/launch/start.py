"""From a run file to a running attempt; what the command line, the flow and the tests all call."""

from __future__ import annotations

from configs.availability import unavailable
from configs.load import LoadedRun
from configs.plan import Plan, make_plan
from runtime.errors import UnavailableFeature
from runtime.launch.attempts import Launch
from runtime.launch.local import LocalLaunch
from runtime.rundir.layout import RunRoot
from runtime.rundir.workflow import Counts


def start_run(
    loaded: LoadedRun,
    *,
    reason: str = "start",
    lost_attempt: int | None = None,
    lease_s: float | None = None,
) -> Launch:
    """Start the run, attach to its live attempt, or find it complete. Idempotent.

    Args:
        loaded: the run file with its ``--set`` values.
        reason: for the epoch record, when an attempt is started.
        lost_attempt: the attempt that was found lost.
        lease_s: of a fresh run; None takes what suits its disk.

    Raises:
        UnavailableFeature: if the file asks for machinery this version lacks; nothing was started.
        ConfigError: if the output root belongs to another training.
    """
    missing = unavailable(loaded.spec)
    if missing:
        raise UnavailableFeature("; ".join(missing))
    plan = make_plan(loaded)
    return LocalLaunch().start(
        RunRoot.of(loaded.spec.output.root),
        loaded.spec.model_dump_json(),
        plan.training_digest,
        run=loaded.spec.name,
        plan_json=plan.model_dump_json(),
        env=dict(loaded.spec.launch.env),
        expected=expected_counts(loaded, plan),
        reason=reason,
        lost_attempt=lost_attempt,
        lease_s=lease_s,
    )


def expected_counts(loaded: LoadedRun, plan: Plan) -> Counts:
    """What an undisturbed run makes; zeros where only the data's end decides."""
    schedule = plan.schedule
    return Counts(
        updates=schedule.updates or 0,
        checkpoints=max(0, (schedule.num_commits or 0) - 1),
        evaluations=(schedule.num_evaluations or 0) * len(loaded.spec.evaluation.sets),
        exports=int(schedule.export),
    )
