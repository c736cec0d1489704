"""`milepost run FILE`: start a run, or attach to it, and follow it to its end."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from configs.load import LoadedRun
from flows.commands._run_file import AsJson, Debug, RunFile, Sets, load_or_exit

if TYPE_CHECKING:
    from runtime.errors import RunError
    from runtime.rundir.layout import RunRoot

Detach = Annotated[bool, typer.Option("--detach", help="Start it and return at once.")]

Build = Annotated[
    str | None,
    typer.Option("--build", metavar="TARGET", help="Build the image into registry.host/name."),
]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(run)


def run(
    file: RunFile,
    sets: Sets = None,
    detach: Detach = False,
    build: Build = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a run file; attach where the run is live, start nothing where it is complete.

    With another backend than local: image, submission, and watching; what is preempted or
    interrupted is submitted again where launch.auto_resume says so.
    Ctrl-C once commits and stops, twice stops now. Exit codes are those of `status`.
    """
    loaded = load_or_exit(file, sets, as_json=as_json, debug=debug)
    if loaded.spec.launch.backend == "local" and build is None:
        follow(loaded, detach, as_json, debug)
    from flows.commands._submitted import follow_submitted

    follow_submitted(loaded, build, detach=detach, as_json=as_json, debug=debug)


def follow(loaded: LoadedRun, detach: bool, as_json: bool, debug: bool) -> NoReturn:
    """Start or attach, follow unless detached, say how it stands, exit with that."""
    from flows.commands._attached import Attached
    from runtime.launch.start import start_run
    from runtime.rundir.layout import RunRoot

    if detach:
        launch = loaded.spec.launch.model_copy(update={"detached": True})
        loaded = replace(loaded, spec=loaded.spec.model_copy(update={"launch": launch}))
    with errors_said(as_json=as_json, debug=debug):
        started = start_run(loaded)
    root = RunRoot.of(loaded.spec.output.root)
    if not as_json:
        typer.echo(f"{started.how}: attempt {started.attempt} of {loaded.spec.name}, {root.path}")
        if started.notice:
            typer.echo(started.notice)
    if not detach and started.how != "complete":
        problem = Attached(root, loaded.path, loaded.sets, started.attempt).follow()
        if problem is not None:
            typer.echo(f"the Prefect flow: {problem}", err=True)
    say_standing(root, named(loaded), as_json=as_json)


def named(loaded: LoadedRun) -> str:
    """What names the run in the command that comes next: the file alone would be another run's."""
    return str(loaded.spec.output.root if loaded.sets else loaded.path)


@contextmanager
def errors_said(*, as_json: bool, debug: bool) -> Generator[None]:
    """An error of ours in the block is said, and ends the command with 1; raised under --debug."""
    from runtime.errors import RunError

    try:
        yield
    except RunError as error:
        if debug:
            raise
        say_error(error, as_json=as_json)
        raise typer.Exit(1) from error


def say_error(error: RunError, *, as_json: bool) -> None:
    """The error and the next look, on standard error for a person."""
    if as_json:
        answer = {"ok": False, "error": type(error).__name__, "message": error.message}
        typer.echo(json.dumps(answer | {"next_check": error.next_check}))
    else:
        typer.echo(f"{error.message}\nlook at: {error.next_check}", err=True)


def say_standing(root: RunRoot, argument: str, *, as_json: bool) -> NoReturn:
    """The status, as `milepost status` gives it, and its exit code."""
    from flows.commands._standing import as_object, lines, standing

    found = standing(root)
    if as_json:
        typer.echo(json.dumps(as_object(found, argument)))
    else:
        for line in lines(found, argument):
            typer.echo(line)
    raise typer.Exit(found.exit_code)
