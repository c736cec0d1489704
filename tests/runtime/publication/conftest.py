from functools import partial

import pytest

from tests.runtime.publication.tiny_house import House


@pytest.fixture
def house(tmp_path):
    return partial(House, tmp_path)
