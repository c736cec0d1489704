"""What several tests of evaluations start from."""

from pathlib import Path

import pytest

from tests.runtime.evaluation.owed import Owed


@pytest.fixture
def owed(tmp_path: Path) -> Owed:
    return Owed(tmp_path)
