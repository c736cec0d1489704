"""`milepost resume RUN`: one more try of a held step, or the next epoch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from flows.commands._run_file import AsJson, Debug, Sets
from flows.commands._run_name import RunName, find_or_exit

Detach = Annotated[bool, typer.Option("--detach", help="Start it and return at once.")]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(resume)


def resume(
    run: RunName,
    sets: Sets = None,
    detach: Detach = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Let a run go on from its last commit, and follow it; a complete run starts nothing.

    Of a live run whose step is held, one more try is asked for, and the command returns at once.
    With a run file as RUN that file is used, otherwise the one frozen in the output root. Ctrl-C
    once commits and stops, twice stops now. Exit codes are those of `status`; with --detach, and
    where nothing was started, 0. 1: refused.
    """
    from flows.commands._following import interrupts_stop
    from flows.commands.watch import follow_and_say
    from runtime.errors import RunError
    from runtime.launch.resume import resume_run

    place = find_or_exit(run, sets, as_json=as_json)
    try:
        resumed = resume_run(place.root, place.file, detached=detach)
    except RunError as error:
        if debug:
            raise
        answer = {"ok": False, "error": type(error).__name__, "message": error.message}
        typer.echo(json.dumps(answer) if as_json else error.message, err=not as_json)
        raise typer.Exit(1) from error
    is_followed = resumed.how in ("started", "attached") and not detach
    if not as_json:
        typer.echo(_WORDS[resumed.how].format(**asdict(resumed)))
        if resumed.notice:
            typer.echo(resumed.notice)
    elif not is_followed:
        typer.echo(json.dumps({"root": str(place.root.path), **asdict(resumed)}))
    if is_followed:
        with interrupts_stop(place.root):
            follow_and_say(place, timeout_s=None, as_json=as_json)


_WORDS = {
    "complete": "it is complete: nothing was started",
    "running": "attempt {attempt} is running: nothing was started",
    "retried": "asked attempt {attempt} for one more try ({failure_id})",
    "started": "started attempt {attempt}",
    "attached": "attached to attempt {attempt}",
}
