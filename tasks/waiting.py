"""The one loop behind every task: ask the run directory until the step stands.

A task's own retries only cover losing sight of the run: with ``local`` a lost run gets a new
epoch, at most three without a commit between them (``runtime.session.ensure`` counts).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prefect.runtime import task_run

from runtime.errors import RetryBy, SessionLost
from runtime.launch.start import start_run
from runtime.rundir.receipts import Receipt
from runtime.session.answers import Done, Ended, Held, Lost, Rewound, Running
from runtime.session.ensure import ensure
from runtime.session.steps import Step
from tasks.display import show_again
from tasks.ended import RunEnded
from tasks.handle import RunHandle
from tasks.phases import enter_phase, heed_cancellation, show_held
from tasks.retrying import retried_by

RETRIES = 3
RETRY_DELAYS_S = [1.0, 5.0, 15.0]
POLL_S = 5.0
"""Progress is shown this often at least."""
HELD_POLL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a step came out for its caller."""

    receipt: Receipt | None
    """None where history was rewound below what the caller had seen."""
    rewound_to: int | None = None


is_lost = retried_by(RetryBy.TASK)
"""Retry condition of every task: the run was lost, and a new epoch may go on."""


def until_done(
    run: RunHandle, step: Step, show: Callable[[Running], None] = lambda _: None
) -> Outcome:
    """Wait for a step; on a task's retry a new epoch is started first.

    Raises:
        SessionLost: if nobody works towards it any more (the task's retry starts an epoch).
        RunEnded: if the run stopped, parked or failed before it.
        WaitTimeout: if nothing moved for longer than any stage may take.
    """
    if (task_run.run_count or 1) > 1:
        _take_up(run, step)
    # Also where every step stands already, as for a flow that catches up with a fast run.
    _keep_in_touch(run)
    deadline_s = _deadline_s(run)
    held: str | None = None
    while True:
        match ensure(run.root, step, timeout_s=POLL_S, deadline_s=deadline_s):
            case Done(receipt=receipt):
                return Outcome(receipt=receipt)
            case Running() as running:
                _keep_in_touch(run)
                if held is not None:
                    held = None
                    enter_phase("Training")
                show(running)
            case Held(failure=failure):
                _keep_in_touch(run)
                if failure.id != held:
                    held = failure.id
                    show_held(run, failure)
                time.sleep(HELD_POLL_S)
            case Rewound(to=to):
                return Outcome(receipt=None, rewound_to=to)
            case Lost(reason=reason):
                raise SessionLost(f"{step}: {reason}", step=str(step))
            case Ended(reason=reason) as ended:
                raise RunEnded(
                    f"{step} was not reached: {reason}", state=ended.state, activity=ended.activity
                )


def _keep_in_touch(run: RunHandle) -> None:
    """Between two looks at the run: what the server could not be told, and what it could not."""
    show_again()
    heed_cancellation(run)


def _take_up(run: RunHandle, step: Step) -> None:
    """Start the next epoch of a run that is still lost; another flow may have been faster.

    With a scheduler only the launch flow submits again; this one looks once more.
    """
    answer = ensure(run.root, step, timeout_s=0.0)
    if isinstance(answer, Lost) and run.loaded.spec.launch.backend == "local":
        start_run(run.loaded, reason="the run was lost", lost_attempt=answer.attempt)


def _deadline_s(run: RunHandle) -> float:
    """Longest time without progress that is no failure: twice the longest single stage there is."""
    spec = run.loaded.spec
    collection = spec.rollout.waiting_deadline + spec.rollout.running_deadline
    evaluation = spec.rollout.drain_deadline + spec.evaluation.deadline
    return 2 * max(collection, evaluation, 1800.0)
