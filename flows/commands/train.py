"""`milepost train FILE`: train in an allocation that exists, or attach to an attempt."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from configs.load import LoadedRun
from flows.commands._run_file import AsJson, Debug, Sets, load_or_exit
from flows.commands.run import follow

_RANK_VARIABLES = ("BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT", "RANK", "WORLD_SIZE")

File = Annotated[
    Path | None, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Run file.")
]
AttemptFolder = Annotated[
    Path | None,
    typer.Option("--attempt", exists=True, file_okay=False, help="Only attach, beside a guard."),
]


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(train)


def train(
    file: File = None,
    attempt: AttemptFolder = None,
    sets: Sets = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train on this node alone. With --attempt a guard runs: only the flow is attached."""
    if (file is None) == (attempt is None):
        typer.echo("give a run file, or --attempt with an attempt's folder", err=True)
        raise typer.Exit(2)
    if attempt is not None:
        raise typer.Exit(attach_flow(attempt))
    assert file is not None
    loaded = load_or_exit(file, sets, as_json=as_json, debug=debug)
    problems = refusals(loaded)
    if problems:
        typer.echo("\n".join(problems), err=True)
        raise typer.Exit(1)
    follow(here(loaded), detach=False, as_json=as_json, debug=debug)


def here(loaded: LoadedRun) -> LoadedRun:
    """The same run on this machine, whatever scheduler its file names.

    Its flow loads the file once more: the replacements say so too.
    """
    launch = loaded.spec.launch.model_copy(update={"backend": "local"})
    spec = loaded.spec.model_copy(update={"launch": launch})
    return replace(loaded, spec=spec, sets=(*loaded.sets, 'launch.backend="local"'))


def refusals(loaded: LoadedRun) -> list[str]:
    """Why this run cannot be trained by one process of one node, all reasons at once."""
    spec = loaded.spec
    problems: list[str] = []
    if spec.launch.replicas > 1:
        problems.append(
            f"launch.replicas = {spec.launch.replicas}: train runs on one node; use milepost run"
        )
    if spec.reward.judge is not None and spec.reward.judge.managed:
        problems.append("reward.judge.managed = true: managed judges are started by milepost run")
    problems += [
        f"{name} is set: this is a replica of a group, whose guard starts the session"
        for name in _RANK_VARIABLES
        if os.environ.get(name, "").strip()
    ]
    return problems


def attach_flow(attempt: Path) -> int:
    """Run the flow of an attempt whose guard runs; its exit status says how the flow ended."""
    from flows.commands._attached import quiet_prefect

    quiet_prefect()
    from flows.train import train as train_flow

    state = train_flow(attempt.absolute() / "run.json", return_state=True)
    return 0 if state.is_completed() else 1
