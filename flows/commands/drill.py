"""`milepost drill`: kill short runs at random, and show what was lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from flows.commands._run_file import AsJson

Kills = Annotated[int, typer.Option("--kills", min=1, help="Kills to deal.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where the runs lie; absent: a temporary folder.")
]
Updates = Annotated[int, typer.Option("--updates", min=2, help="Updates of each run.")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", min=0, help="Deal no kills after so long.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="FAULT", help="Deal only these faults; `drop at generation.answer`."
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", help="Only runs of this kind: deterministic, ahead, rolling."),
]

BROKEN = 1


def register(app: typer.Typer) -> None:
    """Put the command on the app."""
    app.command()(drill)


def drill(
    kills: Kills = 10,
    seed: Seed = 1,
    folder: Folder = None,
    updates: Updates = 60,
    minutes: Minutes = None,
    only: Only = None,
    variant: Variants = None,
    as_json: AsJson = False,
) -> None:
    """Kill short runs on this machine, in every way there is, and resume them to their end.

    A line per kill, then a table: fault, times fired, detected, decided, recovered after (medians),
    prompts lost, doubled. With --json the lines go to standard error, and one object ends it.

    0: every run held all it promises; 1: one did not, and its folder is kept; 2: wrong usage.
    """
    from runtime.drill.campaign import Campaign, drill_folder
    from runtime.drill.catalogue import WEIGHTS, parse
    from runtime.drill.job import VARIANTS, Variant
    from runtime.drill.report import as_object, table

    try:
        for card in only or ():
            parse(card)
    except ValueError as error:
        typer.echo(f"{error}: {', '.join(WEIGHTS)}; some can be had at one point", err=True)
        raise typer.Exit(2) from error
    variants: list[Variant] = [v for v in VARIANTS if variant is None or v in variant]
    if unknown := sorted({*(variant or ())} - {*VARIANTS}):
        typer.echo(f"no run is of kind {unknown[0]!r}: {', '.join(sorted({*VARIANTS}))}", err=True)
        raise typer.Exit(2)

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    with drill_folder(folder) as place:
        campaign = Campaign(
            place, seed=seed, say=say, updates=updates, names=only or [*WEIGHTS], variants=variants
        )
        outcome = campaign.run(kills, within_s=math.inf if minutes is None else 60 * minutes)
    if as_json:
        typer.echo(json.dumps(as_object(outcome)))
    else:
        for line in (*table(outcome), *outcome.problems):
            typer.echo(line)
    raise typer.Exit(BROKEN if outcome.problems else 0)
