"""`milepost watch RUN`: a line per change, until the run ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from flows.commands._run_file import AsJson, Sets
from flows.commands._run_name import Place, RunName, find_or_exit

Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Stop watching after so many seconds.")
]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(watch)


def watch(
    run: RunName, sets: Sets = None, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """Follow a run to its end; whoever watches is attached to it. Exit codes are those of `status`.

    Ctrl-C ends the watching, not the run.
    """
    place = find_or_exit(run, sets, as_json=as_json)
    follow_and_say(place, timeout_s=timeout, as_json=as_json)


def follow_and_say(place: Place, *, timeout_s: float | None, as_json: bool) -> NoReturn:
    """Follow to the end, then say how the run stands, as `status` does."""
    from flows.commands._following import follow

    say: Callable[[str], None] = (lambda line: None) if as_json else typer.echo
    follow(place.root, say, timeout_s=timeout_s)
    say_standing(place, as_json=as_json)


def say_standing(place: Place, *, as_json: bool) -> NoReturn:
    """The status in one line for a person, or whole as JSON; exits with its code."""
    from flows.commands._standing import as_object, headline, next_command, standing

    found = standing(place.root)
    if as_json:
        typer.echo(json.dumps(as_object(found, place.argument)))
    else:
        typer.echo(f"{found.run}: {headline(found)} at update {found.update}")
        if found.next_check is not None:
            typer.echo(f"look at: {found.next_check}")
        typer.echo(f"next: {next_command(found, place.argument)}")
    raise typer.Exit(found.exit_code)
