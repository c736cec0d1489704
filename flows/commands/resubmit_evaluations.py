"""`milepost resubmit-evaluations [RUN...]`: the scheduled pass, by hand and at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands._run_file import AsJson
from flows.commands._run_name import find_or_exit

if TYPE_CHECKING:
    from runtime.evaluation.submission import Row

Runs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN]...", help="Names, run files or output roots; none: all known."),
]
Force = Annotated[bool, typer.Option("--force", help="Set cap, delay and repeated failures aside.")]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(resubmit_evaluations)


def resubmit_evaluations(runs: Runs = None, force: Force = False, as_json: AsJson = False) -> None:
    """Submit the evaluations that runs still owe to the Prefect server in reach.

    Another pass at the same time changes nothing: each is submitted once.
    0: done, though something may wait; 1: the server takes no submissions; 2 wrong usage.
    """
    from runtime.clock import SystemClock
    from runtime.errors import RunError
    from runtime.evaluation.submission import Rules, submit_due
    from runtime.rundir.known import known_roots, run_folders
    from tasks.jobs import DeploymentJobs

    places = [find_or_exit(run, as_json=as_json).root.path for run in runs or []]
    rules = Rules(by="a person", force=force)
    rows: list[Row] = []
    for root in known_roots(places or run_folders()):
        try:
            rows += submit_due(root, DeploymentJobs(), rules, clock=SystemClock())
        except RunError as error:
            answer = {"ok": False, "error": type(error).__name__, "message": error.message}
            typer.echo(json.dumps(answer) if as_json else error.message, err=not as_json)
            raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"evaluations": [_as_object(row) for row in rows]}))
        return
    for row in rows:
        state = "damaged" if row.receipt is None else row.receipt.state
        typer.echo(f"{_run_of(row)} {row.asked}: {state}, {row.verdict}: {row.why}")
    if not rows:
        typer.echo("no evaluation was requested in any known run, or another pass is under way")


def _as_object(row: Row) -> dict[str, object]:
    receipt = row.receipt
    return {
        "run": _run_of(row),
        "root": str(row.root.path),
        "update": row.update,
        "set": row.folder.name,
        "state": None if receipt is None else receipt.state,
        "reason": None if receipt is None else receipt.reason,
        "tries": None if receipt is None else len(receipt.tries),
        "next_try_at": None if receipt is None else receipt.next_try_at,
        "verdict": row.verdict,
        "why": row.why,
        "job": row.job,
    }


def _run_of(row: Row) -> str:
    return row.root.path.name if row.receipt is None else row.receipt.request.run
