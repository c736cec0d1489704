"""What a finished run owes: its export, its compiler caches, and the end record."""

from __future__ import annotations

from prefect import task
from prefect.logging import get_run_logger

from runtime.session.steps import StepKind
from tasks.artifacts import summarise
from tasks.display import show_rest
from tasks.handle import RunHandle
from tasks.waiting import RETRIES, RETRY_DELAYS_S, Outcome, is_lost, until_done

REST_DEADLINE_S = 600.0
"""For a server that is away at the end of a run; Prefect's own last call waits as long for it."""


@task(
    name="finish", retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_lost
)
def finish(run: RunHandle) -> Outcome:
    """The end record says complete: every process has left in good order."""
    return until_done(run, run.step(StepKind.FINISH))


@task(name="cache", retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_lost)
def cache(run: RunHandle) -> Outcome:
    """What became of the compiler caches is written down; it changes no result."""
    outcome = until_done(run, run.step(StepKind.CACHE))
    if outcome.receipt is not None:
        get_run_logger().info("compiler caches: %s", outcome.receipt.detail)
    return outcome


@task(name="report")
def report(run: RunHandle) -> str:
    """Write the HTML report and the summary; neither can fail a run.

    Waits for a server that is away, so that what happened meanwhile is shown after all.
    """
    from runtime.analysis.report import write_report

    write_report(run.root.path)
    text = summarise(run)
    show_rest(REST_DEADLINE_S)
    return text


@task(
    name="export", retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_lost
)
def export(run: RunHandle) -> Outcome:
    """The final weights lie in ``export/`` as a Hugging Face folder, verified."""
    return until_done(run, run.final_export())
