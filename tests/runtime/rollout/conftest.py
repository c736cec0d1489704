import pytest

from tests.runtime.rollout.world import Outcome, VirtualTime, World, quiet


@pytest.fixture(scope="session")
def world_class():
    return World


@pytest.fixture(scope="session")
def outcome_class():
    return Outcome


@pytest.fixture(scope="session")
def virtual_time_class():
    return VirtualTime


@pytest.fixture(scope="session")
def settle_tasks():
    return quiet
