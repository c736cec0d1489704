from pathlib import Path

import pytest

from runtime.rundir.layout import RunRoot


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    root = RunRoot.of(tmp_path / "run")
    root.create()
    return root
