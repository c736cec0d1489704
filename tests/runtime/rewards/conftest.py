"""A user's verifiers on disk, and what was asked of them."""

import pytest

from tests.runtime.rewards.their_verifiers import MODULE, Calls


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "their_verifiers.py").write_text(MODULE)
    return folder


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path / "calls")
