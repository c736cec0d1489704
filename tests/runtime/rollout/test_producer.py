import anyio
import pytest

from runtime.data.samples import PromptId
from runtime.errors import SessionError


@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio


async def test_collections_come_in_order_of_prompts_until_the_data_ends(world_class):
    world = world_class(num_prompts=7)
    async with world.running():
        taken = await world.train(10)
    ids = [[g.prompt.id.index for g in c.groups] for c in taken]
    assert ids == [[0, 1], [2, 3], [4, 5], [6]]
    assert [c.id for c in taken] == [1, 2, 3, 4]
    counts = world.ledger.counts()
    assert (counts.consumed, counts.pending, counts.remaining) == (7, 0, 0)


async def test_asking_a_producer_that_does_not_run_is_an_error(world_class):
    world = world_class()
    with pytest.raises(SessionError):
        await world.producer.take(2, world.policy(0))
