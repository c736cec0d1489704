"""Runs that are known on this machine: output roots in a few folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.names import read_variable
from runtime.rundir.layout import RunRoot

RUNS = "RUNS"
"""``MILEPOST_RUNS``: folders that hold output roots, separated like ``PATH``; ``runs`` is first."""


def run_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Folders that hold output roots; some may not exist."""
    given = read_variable(RUNS, environ) or ""
    return [Path("runs").absolute(), *(Path(part) for part in given.split(os.pathsep) if part)]


def is_root(folder: Path) -> bool:
    """Whether a run was ever started there."""
    return (folder / "chain").is_dir() or (folder / "attempts").is_dir()


def known_roots(places: Sequence[Path]) -> Iterator[RunRoot]:
    """Output roots, each once: places that are one, and those directly inside of others."""
    seen: set[Path] = set()
    for place in places:
        if not place.is_dir():
            continue
        for folder in [place] if is_root(place) else sorted(place.iterdir()):
            root = RunRoot.of(folder)
            if is_root(folder) and root.path not in seen:
                seen.add(root.path)
                yield root
