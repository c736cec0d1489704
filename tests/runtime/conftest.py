"""What tests of several rooms start: a Ray of this process's own."""

from collections.abc import Iterator

import pytest

from tests.runtime.small_ray import one_node


@pytest.fixture(scope="module")
def ray_head() -> Iterator[None]:
    """One node, for all tests of the module."""
    with one_node():
        yield
