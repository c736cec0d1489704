"""Training from one commit to the next."""

from __future__ import annotations

from prefect import task

from runtime.session.steps import StepKind
from tasks.artifacts import StretchProgress, table_collections
from tasks.handle import RunHandle, Stretch
from tasks.waiting import RETRIES, RETRY_DELAYS_S, Outcome, is_lost, until_done


@task(
    name="train",
    task_run_name="train {stretch.title}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=is_lost,
)
def train_segment(run: RunHandle, stretch: Stretch) -> Outcome:
    """The collections of a stretch are trained on; shows a bar while it goes on."""
    progress = StretchProgress(run, stretch)
    outcome = until_done(run, run.step(StepKind.SEGMENT, stretch), progress.show)
    progress.finish()
    table_collections(run, stretch)
    return outcome


@task(
    name="commit",
    task_run_name="commit update {stretch.update}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=is_lost,
)
def commit_checkpoint(run: RunHandle, stretch: Stretch) -> Outcome:
    """A commit at or after the boundary stands in the chain."""
    return until_done(run, run.step(StepKind.CHECKPOINT, stretch))
