"""Preparation and rendezvous: what stands before the first prompt."""

from __future__ import annotations

from prefect import task

from runtime.session.steps import StepKind
from tasks.handle import RunHandle
from tasks.waiting import RETRIES, RETRY_DELAYS_S, Outcome, is_lost, until_done


@task(
    name="prepare", retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_lost
)
def prepare(run: RunHandle) -> Outcome:
    """Model, data and verifiers stand frozen under ``prepared/``."""
    return until_done(run, run.step(StepKind.PREPARE))


@task(
    name="rendezvous",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=is_lost,
)
def rendezvous(run: RunHandle) -> Outcome:
    """Trainer and engines are up, the first policy is published, commit 0 stands."""
    return until_done(run, run.step(StepKind.RENDEZVOUS))
