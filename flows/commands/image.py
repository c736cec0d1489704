"""`milepost image build | inspect | lock`: the image of the commit that is checked out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from flows.commands._run_file import AsJson, Debug

Target = Annotated[str, typer.Argument(metavar="TARGET", help="registry.host/name to build into.")]
Image = Annotated[str, typer.Argument(metavar="IMAGE", help="registry.host/name@sha256:...")]
Base = Annotated[
    str, typer.Argument(metavar="BASE", help="registry.host/name, with tag or digest.")
]
From = Annotated[
    Path, typer.Option("--checkout", exists=True, file_okay=False, help="A git checkout.")
]
How = Annotated[
    Literal["registry", "buildkit"],
    typer.Option("--builder", help="registry needs no container engine; buildkit needs docker."),
]

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Put the commands on the app."""
    group = typer.Typer(
        name="image", help="Images of a commit over a locked base.", no_args_is_help=True
    )
    for command in (build, inspect, lock):
        group.command()(command)
    app.add_typer(group)


def build(
    target: Target,
    checkout: From = Path(),
    builder: How = "registry",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Build the image of the commit, or find it built. Same commit and lock, same digest.

    A checkout with uncommitted or untracked files is refused. 0: the image stands; 1: it does not.
    """
    from runtime.launch.image.building import build_image

    built = _or_exit(
        lambda: build_image(target, checkout=checkout, builder=builder), as_json, debug
    ).as_object()
    _say(built, as_json, f"{built['how']}: {built['image']}")


def inspect(image: Image, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show what an image of ours says about itself; 1 where it is not there, or none of ours."""
    from runtime.launch.image.building import inspect_image

    labels = _or_exit(lambda: inspect_image(image), as_json, debug)
    fields = asdict(labels) | {"entry_points": dict(labels.entry_points)}
    _say(fields, as_json, image)


def lock(
    base: Base, checkout: From = Path(), as_json: AsJson = False, debug: Debug = False
) -> None:
    """Resolve a base and write it into configs/runtime.lock.json; commit that file."""
    from runtime.launch.image.building import lock_base

    locked = _or_exit(lambda: lock_base(base, checkout), as_json, debug)
    _say({"base": locked}, as_json, "locked")


def _or_exit(do: Callable[[], T], as_json: bool, debug: bool) -> T:
    from flows.commands.run import say_error
    from runtime.errors import RunError

    try:
        return do()
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'milepost[launch]'", err=True)
        raise typer.Exit(1) from error
    except RunError as error:
        if debug:
            raise
        say_error(error, as_json=as_json)
        raise typer.Exit(1) from error


def _say(fields: dict[str, Any], as_json: bool, headline: str) -> None:
    if as_json:
        typer.echo(json.dumps(fields))
        return
    typer.echo(headline)
    for name, value in fields.items():
        typer.echo(f"  {name:<12}  {value if value not in ('', (), {}) else '-'}")
