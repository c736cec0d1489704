"""Evaluation of one set at one boundary."""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from runtime.session.steps import StepKind
from tasks.handle import RunHandle, Stretch
from tasks.waiting import RETRIES, RETRY_DELAYS_S, Outcome, is_lost, until_done


@task(
    name="evaluate",
    task_run_name="evaluate {set_name} at update {stretch.update}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=is_lost,
)
def evaluate(run: RunHandle, stretch: Stretch, set_name: str) -> Outcome:
    """A result of the set at this update stands; its figures go to the log."""
    outcome = until_done(run, run.step(StepKind.EVALUATION, stretch, set_name=set_name))
    if outcome.receipt is not None:
        get_run_logger().info("%s: %s", set_name, outcome.receipt.detail.get("metrics"))
    return outcome
