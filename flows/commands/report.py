"""`milepost report RUN`: one HTML page about a run."""

from __future__ import annotations

import json

import typer

from flows.commands._run_file import AsJson, Sets
from flows.commands._run_name import RunName, find_or_exit


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(report)


def report(run: RunName, sets: Sets = None, as_json: AsJson = False) -> None:
    """Write `reports/report.html` of a run in any state, and print its path.

    0: written; 1: it could not be; 2: wrong usage.
    """
    from runtime.analysis.report import write_report

    place = find_or_exit(run, sets, as_json=as_json)
    try:
        path = write_report(place.root.path)
    except OSError as error:
        message = f"no report of {place.root.path}: {error}"
        typer.echo(json.dumps({"error": message}) if as_json else message, err=not as_json)
        raise typer.Exit(1) from error
    typer.echo(json.dumps({"root": str(place.root.path), "report": str(path)}) if as_json else path)
