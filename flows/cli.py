"""The `milepost` command. Each command is a file in `flows/commands` with a `register(app)`.

Only the file of the command that was asked for is imported, so that `plan` pays for nothing else;
heavy imports stand inside the commands all the same, since `--help` reads every file.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

import flows.commands


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The app with the command that ``arguments`` name, or with all of them."""
    app = typer.Typer(
        name="milepost",
        help="RL post-training as durable workflows.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    # A callback keeps an app with a single command one with subcommands.
    app.callback()(lambda: None)
    modules = command_modules()
    asked = next((text for text in arguments if not text.startswith("-")), None)
    chosen = [asked] if asked in modules else sorted(modules)
    for name in chosen:
        import_module(modules[name]).register(app)
    return app


def command_modules() -> dict[str, str]:
    """Command name -> module; names with a leading underscore are shared parts, not commands."""
    found = (module.name for module in pkgutil.iter_modules(flows.commands.__path__))
    return {
        name.replace("_", "-"): f"flows.commands.{name}"
        for name in found
        if not name.startswith("_")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 1 for a run file with problems, 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    build_app(given)(args=given)


if __name__ == "__main__":
    main()
