"""`milepost stop RUN`: commit and stop, end for good, or stop at once."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from configs.run import RunSpec
from flows.commands._run_file import AsJson, Sets
from flows.commands._run_name import USAGE, RunName, find_or_exit
from runtime.rundir.layout import RunRoot

Final = Annotated[bool, typer.Option("--final", help="End the run, as its wall-clock bound would.")]
Now = Annotated[bool, typer.Option("--now", help="Kill the session; the last commit stands.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")]
Deadline = Annotated[
    float, typer.Option("--deadline", min=0, help="Longest wait for the end, in seconds.")
]

STILL_RUNNING = 3
UNKNOWN = 6


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(stop)


def stop(
    run: RunName,
    sets: Sets = None,
    final: Final = False,
    now: Now = False,
    wait: Wait = True,
    deadline: Deadline = 900.0,
    as_json: AsJson = False,
) -> None:
    """Ask a run to commit and stop; `milepost resume` takes it up again.

    A submitted run that writes no end by the deadline is ended by its scheduler.

    0: it has ended, or was asked to with --no-wait; 3: it had not ended by the deadline; 4: it
    failed on the way; 6: its owner is gone without a word, or there is no run; 2: wrong usage.
    """
    from runtime.session.stopping import ask_to_stop, wait_ended

    if final and now:
        typer.echo("--final and --now exclude each other", err=True)
        raise typer.Exit(USAGE)
    place = find_or_exit(run, sets, as_json=as_json)
    mode = "final" if final else "now" if now else "stop"
    asked = ask_to_stop(
        place.root, mode, by=f"milepost stop, pid {os.getpid()}", time_s=time.time()
    )
    answer = {"root": str(place.root.path), "mode": mode, "how": asked.how, "epoch": asked.epoch}
    code, words = 0, _WORDS[asked.how]
    if asked.how == "nothing":
        code = UNKNOWN
    elif asked.how == "asked" and wait:
        if not as_json:
            typer.echo(f"asked epoch {asked.epoch} to end ({mode}); waiting for its end record")
        end = wait_ended(place.root, asked.epoch, deadline_s=deadline)
        answer["ended"] = end is not None
        if end is not None:
            fields = {"state", "activity", "ended_by", "update"}
            answer |= end.model_dump(mode="json", include=fields)
            code = 4 if end.state == "failed" else 0
            words = f"{end.activity or end.state} at update {end.update}, ended by {end.ended_by}"
        else:
            code, words = _without_end(place.root)
    if code != 0 and wait:
        # The request comes first; the scheduler's own stop only where it brought no end.
        spec = place.file.spec if place.file is not None else None
        code, words = _at_scheduler(place.root, spec) or (code, words)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(words)
    raise typer.Exit(code)


_WORDS = {
    "asked": "asked it to end",
    "next": "nobody works on it: the next epoch will end it (milepost resume)",
    "over": "it is not running",
    "nothing": "no attempt was ever started here",
}


def _at_scheduler(root: RunRoot, spec: RunSpec | None) -> tuple[int, str] | None:
    """Let the scheduler end the newest submitted attempt; None where there is none to end."""
    from runtime.errors import RunError
    from runtime.launch.reporting import stop_at_scheduler

    try:
        stopped = stop_at_scheduler(root, spec)
    except RunError as error:
        return UNKNOWN, error.message
    return None if stopped is None else (0, f"its scheduler was asked to end {stopped}")


def _without_end(root: RunRoot) -> tuple[int, str]:
    from flows.commands._standing import standing

    found = standing(root)
    if found.stale is not None:
        return UNKNOWN, f"it left no end record: {found.stale}"
    return STILL_RUNNING, f"it has not ended yet: {found.step}: {found.doing}"
