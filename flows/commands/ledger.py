"""`milepost ledger RUN`: what committed history says about every prompt."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from flows.commands._run_file import AsJson, Sets
from flows.commands._run_name import RunName, find_or_exit
from runtime.rundir.layout import RunRoot

Prompts = Annotated[
    bool, typer.Option("--prompts", help="Add every consumed prompt with its update.")
]

BROKEN = 1
UNKNOWN = 6


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(ledger)


def ledger(
    run: RunName, sets: Sets = None, prompts: Prompts = False, as_json: AsJson = False
) -> None:
    """Count every prompt of committed history by the end it reached.

    0: each prompt is in exactly one state; 1: some are lost or doubled, or history cannot be read;
    6: nothing is committed yet; 2: wrong usage.
    """
    from runtime.errors import RunError

    place = find_or_exit(run, sets, as_json=as_json)
    try:
        answer = _answer(place.root, with_prompts=prompts)
    except RunError as error:
        _say(error.message, as_json=as_json)
        raise typer.Exit(BROKEN) from error
    if answer is None:
        _say(f"nothing is committed yet in {place.root.path}", as_json=as_json)
        raise typer.Exit(UNKNOWN)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        for name, value in answer.items():
            if name != "prompts":
                typer.echo(f"{name:<10} {value}")
        for prompt in answer.get("prompts", ()):
            typer.echo(f"{prompt['prompt']}  {prompt['update']}")
    raise typer.Exit(BROKEN if answer["lost"] or answer["doubled"] else 0)


def _answer(root: RunRoot, *, with_prompts: bool) -> dict[str, Any] | None:
    """The counts by name; None before commit 0."""
    # numpy comes with these: not for `--help`.
    from runtime.data.history import consumed_prompts, read_history
    from runtime.rundir.chain import Chain
    from runtime.session.accounts import committed_segments

    segments = committed_segments(root, Chain(root).read())
    if not segments:
        return None
    answer: dict[str, Any] = asdict(read_history(segments))
    if with_prompts:
        answer["prompts"] = [
            {"prompt": str(prompt), "update": update}
            for prompt, update in consumed_prompts(segments)
        ]
    return answer


def _say(message: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        typer.echo(message, err=True)
