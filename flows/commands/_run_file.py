"""Arguments that every command on a run file takes, and how its problems are shown."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from configs.load import LoadedRun, load_run
from configs.problems import Problem, RunFileError

RunFile = Annotated[
    Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Run file (TOML).")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace section.key by a TOML value."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Add the traceback to an error.")]


def load_or_exit(
    file: Path, sets: Sequence[str] | None, *, as_json: bool, debug: bool
) -> LoadedRun:
    """The run a file describes. A file with problems shows them all and ends the command with 1."""
    try:
        return load_run(file, sets or ())
    except RunFileError as error:
        if debug:
            traceback.print_exc()
        show_problems(error.problems, as_json=as_json)
        raise typer.Exit(1) from error


def show_problems(problems: Sequence[Problem], *, as_json: bool) -> None:
    """Every problem: on standard output as JSON, or on standard error for a person."""
    if as_json:
        answer = {"ok": False, "problems": [problem.as_json() for problem in problems]}
        typer.echo(json.dumps(answer))
        return
    for problem in problems:
        typer.echo(str(problem), err=True)
    count = len(problems)
    typer.echo(f"{count} problem{'s' if count != 1 else ''}: nothing was started", err=True)
