"""RUN on the command line: a run's name, its run file, or its output root."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from configs.load import LoadedRun, load_run
from configs.problems import RunFileError
from flows.commands._run_file import show_problems
from runtime.rundir.known import is_root, known_roots, run_folders
from runtime.rundir.layout import RunRoot

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, its run file, or its output root.")
]

USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run lies."""

    root: RunRoot
    file: LoadedRun | None
    """The run file, where that was given."""

    @property
    def argument(self) -> str:
        """What to type for this run in another command."""
        return str(self.file.path if self.file is not None else self.root.path)


def find_or_exit(text: str, sets: Sequence[str] | None = None, *, as_json: bool = False) -> Place:
    """The run that ``text`` names. One that is not there, or not clear, ends the command with 2."""
    path = Path(text)
    if path.is_file():
        loaded = _load(path, sets, as_json=as_json)
        return Place(root=RunRoot.of(loaded.spec.output.root), file=loaded)
    if path.is_dir() and (is_root(path) or os.sep in text):
        return Place(root=RunRoot.of(path), file=None)
    if os.sep in text:
        raise _refused(f"no run file and no output root at {text}", as_json=as_json)
    found = sorted(set(_named(text)))
    if len(found) == 1:
        return Place(root=RunRoot.of(found[0]), file=None)
    if found:
        listed = "\n".join(f"  {root}" for root in found)
        raise _refused(f"several runs are called {text}; give one root:\n{listed}", as_json=as_json)
    looked = ", ".join(str(folder) for folder in run_folders())
    raise _refused(f"no run is called {text}: looked in {looked}", as_json=as_json)


def _load(path: Path, sets: Sequence[str] | None, *, as_json: bool) -> LoadedRun:
    try:
        return load_run(path, sets or ())
    except RunFileError as error:
        show_problems(error.problems, as_json=as_json)
        raise typer.Exit(USAGE) from error


def _refused(message: str, *, as_json: bool) -> typer.Exit:
    if as_json:
        typer.echo(json.dumps({"error": message}))
    else:
        typer.echo(message, err=True)
    return typer.Exit(USAGE)


def _named(name: str) -> Iterator[Path]:
    """Output roots of a name: folders called so, and others whose attempts carry it."""
    for root in known_roots(run_folders()):
        if name in (root.path.name, _name_of(root.path)):
            yield root.path


def _name_of(root: Path) -> str | None:
    numbers = RunRoot.of(root).attempt_numbers()
    try:
        data = RunRoot.of(root).attempt(numbers[-1]).attempt.read_bytes() if numbers else b"{}"
        found: object = json.loads(data)
    except (OSError, ValueError):
        return None
    name = cast("dict[str, object]", found).get("run") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None
