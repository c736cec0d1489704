"""Evaluation: waiting for a set's result, asking for background ones, and making one."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from runtime.clock import SystemClock
from runtime.evaluation.job import JobOrder, run_job
from runtime.evaluation.receipts import derive
from runtime.evaluation.records import Result
from runtime.evaluation.submission import JobsAway, Row, Rules, submit_due
from runtime.rundir.layout import RunRoot
from runtime.session.steps import StepKind
from runtime.waits import stretched
from tasks.display import only_display
from tasks.handle import RunHandle, Stretch
from tasks.jobs import DeploymentJobs
from tasks.waiting import RETRIES, RETRY_DELAYS_S, Outcome, is_lost, until_done

_REQUEST_DEADLINE_S = 120.0
"""From a commit to the request that belongs to it: a snapshot is written between the two."""


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


@task(name="submit evaluations", task_run_name="submit evaluations of update {stretch.update}")
def submit_evaluations(run: RunHandle, stretch: Stretch) -> list[str]:
    """Submit the background evaluations that are due; returns what was submitted.

    What cannot be submitted now waits in its receipt for the resubmission flow.
    """
    until = time.monotonic() + stretched("evaluation_submission", _REQUEST_DEADLINE_S)
    while not _are_requested(run, stretch) and run.end_update() is None:
        if time.monotonic() > until:
            break
        time.sleep(0.5)
    return submit_for(run.root, by=f"flow {flow_run.id}")


@task(name="submit final evaluations")
def submit_final(run: RunHandle) -> list[str]:
    """Submit what a run that has ended still owes; nothing waits for the results."""
    return submit_for(run.root, by=f"flow {flow_run.id}")


@task(name="make result", task_run_name="{set_name} at {policy}, try {number}")
def make_result(root: Path, policy: str, set_name: str, number: int) -> Result:
    """Run one try on engines of its own and write its result; see ``runtime.evaluation.job``."""
    order = JobOrder(
        root=RunRoot.of(root),
        policy=policy,
        set_name=set_name,
        number=number,
        flow_run=None if flow_run.id is None else str(flow_run.id),
    )
    result = anyio.run(run_job, order)
    _show(order, result)
    return result


@task(name="submit waiting")
def submit_freed(root: Path) -> list[str]:
    """Submit what waited for the place in flight that has just become free."""
    return submit_for(RunRoot.of(root), by=f"evaluation {flow_run.id}")


def submit_for(root: RunRoot, *, by: str) -> list[str]:
    """Submit what is due of one run; a server that takes nothing is only logged."""
    try:
        rows = submit_due(root, DeploymentJobs(), Rules(by=by), clock=SystemClock())
    except JobsAway as error:
        get_run_logger().warning("%s; requests wait in %s", error.message, root.evaluations)
        return []
    submitted = [row.asked for row in _new(rows)]
    get_run_logger().info("submitted: %s", ", ".join(submitted) or "nothing")
    return submitted


def _new(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.verdict == "submitted"]


def _are_requested(run: RunHandle, stretch: Stretch) -> bool:
    policies = list(run.root.evaluations.glob(f"e*.u{stretch.update}"))
    return all(
        any((policy / name / "request.json").exists() for policy in policies)
        for name in stretch.evaluations
    )


def _show(order: JobOrder, result: Result) -> None:
    receipt = derive(order.folder, stands=True)
    name = order.root.path.name
    lines = [f"# {name}: {order.set_name} at {order.policy}, {result.state}", ""]
    if receipt is not None and receipt.lag_s is not None:
        lag = f"{receipt.lag_s:.1f} s and {receipt.lag_updates} updates after the request"
        lines.append(f"- try {order.number}, {lag}")
    lines += [f"- items: `{result.items}` in `{order.root.path}`", ""]
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| {key} | {value:.4f} |" for key, value in result.metrics.items()]
    key = "".join(c if c.isalnum() else "-" for c in f"{name}-{order.set_name}".lower())
    with only_display("the figures"):
        create_markdown_artifact(
            markdown="\n".join(lines), key=f"{key}-result", description=f"at {order.policy}"
        )
