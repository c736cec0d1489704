from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import LoadedRun, load_run
from configs.problems import Problem, RunFileError

BASE = """\
name = "base"

[model]
recipe = "laptop"

[data]
recipe = "laptop"

[reward]
verifier = "exact_match"

[output]
root = "out"
"""

Write = Callable[[str], Path]
Load = Callable[..., LoadedRun]
Refuse = Callable[..., list[Problem]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a run file and return its path."""

    def write(text: str = BASE) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write: Write) -> Load:
    """Load the base run with some `--set`."""

    def load(*sets: str) -> LoadedRun:
        return load_run(write(BASE), sets)

    return load


@pytest.fixture
def refuse(write: Write) -> Refuse:
    """Problems of the base run with some `--set`."""

    def refuse(*sets: str) -> list[Problem]:
        with pytest.raises(RunFileError) as caught:
            load_run(write(BASE), sets)
        return caught.value.problems

    return refuse
