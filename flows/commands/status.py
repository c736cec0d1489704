"""`milepost status RUN`: where a run stands, and what proves it."""

from __future__ import annotations

import json

import typer

from flows.commands._run_file import AsJson, Sets
from flows.commands._run_name import RunName, find_or_exit


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(status)


def status(run: RunName, sets: Sets = None, as_json: AsJson = False) -> None:
    """Show where a run stands, row by row of its evidence, and the next command to type.

    0 complete, 3 running, 4 failed, 5 complete with outstanding evidence, 6 stale or unknown,
    7 stopped, held or parked, 2 wrong usage.
    """
    from flows.commands._standing import as_object, lines, standing
    from runtime.launch.reporting import report

    place = find_or_exit(run, sets, as_json=as_json)
    found = standing(place.root)
    submitted = report(place.root, place.file.spec if place.file is not None else None)
    if as_json:
        told = {"scheduler": submitted.as_object() if submitted is not None else None}
        typer.echo(json.dumps(as_object(found, place.argument) | told))
    else:
        for line in (*lines(found, place.argument), *(submitted.lines() if submitted else ())):
            typer.echo(line)
    raise typer.Exit(found.exit_code)
