"""`milepost evaluate RUN`: any set at any update that is left, beside the run or after it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands._run_file import AsJson, Debug
from flows.commands._run_name import RunName, find_or_exit
from runtime.rundir.layout import RunRoot

if TYPE_CHECKING:
    from runtime.evaluation.receipts import EvaluationReceipt
    from runtime.evaluation.submission import Jobs, Row

Update = Annotated[
    int | None, typer.Option("--update", min=0, help="Of a commit or an export; none: the newest.")
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="SET", help="A set's name; none: all sets.")
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for results.")
]
UNDER_WAY = 3
_POLL_S = 0.5
_ASK_S = 10.0
"""How often the server is asked about a job that says nothing."""


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(evaluate)


def evaluate(
    run: RunName,
    update: Update = None,
    only: Only = None,
    wait: Wait = 0.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Evaluate sets of the run file at an update, on engines of their own, through Prefect.

    A result that stands is shown and never made again; one that failed is tried once more.
    0: every result stands; 3: submitted, or waiting for its place; 1: refused, failed, or nothing
    takes submissions now, and the request waits; 2 wrong usage.
    """
    from flows.commands.run import errors_said

    place = find_or_exit(run, as_json=as_json)
    with errors_said(as_json=as_json, debug=debug):
        answers = _evaluate(place.root, update, only or [], wait)
    if as_json:
        typer.echo(json.dumps({"evaluations": answers}))
    else:
        for answer in answers:
            said = answer["metrics"] or answer["why"]
            typer.echo(f"{answer['policy']} {answer['set']}: {answer['state']}, {said}")
    raise typer.Exit(_code([str(answer["state"]) for answer in answers]))


def _code(states: Sequence[str]) -> int:
    if any(state in ("failed", "skipped") for state in states):
        return 1
    return 0 if all(state == "succeeded" for state in states) else UNDER_WAY


def _evaluate(
    root: RunRoot, update: int | None, names: Sequence[str], wait_s: float
) -> list[dict[str, object]]:
    from runtime.clock import SystemClock
    from runtime.evaluation.on_demand import ask_by_hand
    from runtime.evaluation.submission import Rules, submit_due
    from runtime.launch.resume import frozen_run
    from tasks.jobs import DeploymentJobs

    clock, jobs = SystemClock(), DeploymentJobs()
    spec = frozen_run(root).spec
    folders = ask_by_hand(root, spec, update=update, names=names, clock=clock)
    until = time.monotonic() + wait_s
    rows: dict[Path, Row] = {}
    if not all(_is_done(folder) for folder in folders):
        rules = Rules(by="a person", asked=frozenset(folders))
        for row in submit_due(root, jobs, rules, clock=clock):
            rows[row.folder] = row
        _wait(folders, jobs, until)
    return [_as_object(folder, rows.get(folder)) for folder in folders]


def _receipt(folder: Path) -> EvaluationReceipt:
    from runtime.evaluation.receipts import derive

    found = derive(folder, stands=True)
    assert found is not None  # it was asked for a moment ago
    return found


def _is_done(folder: Path) -> bool:
    return _receipt(folder).state == "succeeded"


def _wait(folders: Sequence[Path], jobs: Jobs, until: float) -> None:
    """Until every evaluation has ended, or its job without a word."""
    left, asked_at = list(folders), time.monotonic()
    while left and time.monotonic() < until:
        left = [folder for folder in left if not _has_ended(folder)]
        if time.monotonic() - asked_at > _ASK_S:
            left = [folder for folder in left if not _has_died(folder, jobs)]
            asked_at = time.monotonic()
        time.sleep(_POLL_S)


def _has_ended(folder: Path) -> bool:
    receipt = _receipt(folder)
    return receipt.open_try is None and receipt.state != "requested"


def _has_died(folder: Path, jobs: Jobs) -> bool:
    """Killed, say: the next pass over the run finds out, and writes it down."""
    from runtime.evaluation.submission import JobsAway

    open_ = _receipt(folder).open_try
    if open_ is None or open_.submission is None:
        return False
    try:
        return jobs.state(open_.submission.key) == "over"
    except JobsAway:
        return False


def _as_object(folder: Path, row: Row | None) -> dict[str, object]:
    receipt = _receipt(folder)
    if receipt.state == "succeeded":
        why = "a result stands"
    elif receipt.error is not None:
        why = receipt.error.message
    elif row is not None:
        why = row.why
    else:
        why = "another pass submits at the moment"
    return {
        "run": receipt.request.run,
        "update": receipt.update,
        "policy": receipt.request.policy,
        "set": receipt.request.set,
        "state": receipt.state,
        "reason": receipt.reason,
        "tries": len(receipt.tries),
        "why": why,
        "metrics": dict(receipt.result.metrics) if receipt.result is not None else {},
        "job": row.job if row is not None else None,
    }
