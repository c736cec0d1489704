"""Whatever the speeds and failures: staleness is bounded, and every prompt comes to one end."""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import OverloadError, TransportError
from runtime.rollout.filters import equal_rewards


def behaviour(rng, outcome_class, failure_share, tail):
    def behave(request):
        seconds = rng.choice([0.1, 0.5, 1.0, tail])
        error = None
        if rng.random() < failure_share:
            error = rng.choice([TransportError("reset"), OverloadError("full")])
        return outcome_class(seconds=seconds, error=error)

    return behave


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_staleness_stays_within_its_bound_and_every_prompt_comes_to_one_end(
    world_class, outcome_class, data
):
    max_staleness = data.draw(st.integers(0, 4), label="max_staleness")
    per_collection = data.draw(st.integers(1, 2), label="updates per collection")
    rng = random.Random(data.draw(st.integers(0, 2**16), label="seed"))
    drawn = {
        "num_prompts": data.draw(st.integers(1, 25), label="prompts"),
        "epochs": data.draw(st.integers(1, 2), label="passes"),
        "engines": data.draw(st.integers(1, 2), label="engines"),
        "groups_per_collection": data.draw(st.integers(1, 3), label="groups"),
        "buffer_collections": data.draw(st.integers(1, 2), label="buffer"),
        "max_concurrent_samples": data.draw(st.sampled_from([2, 5, 12, 64]), label="samples"),
        "accept": equal_rewards if data.draw(st.booleans(), label="filter") else None,
    }
    sizes, counts = asyncio.run(
        train_to_the_end(
            world_class,
            behaviour(rng, outcome_class, rng.choice([0.0, 0.2]), rng.choice([1, 4, 20])),
            rng,
            max_staleness=max_staleness,
            updates_per_collection=per_collection,
            filter_max_rounds=1000,
            **drawn,
        )
    )
    assert counts.consumed + counts.filtered == drawn["num_prompts"] * drawn["epochs"]
    assert (counts.pending, counts.remaining, counts.lost, counts.doubled) == (0, 0, 0, 0)
    assert sum(sizes) == counts.consumed
    full = drawn["groups_per_collection"]
    assert all(size == full for size in sizes[:-1]), "only the last one may be short"


async def train_to_the_end(world_class, behave, rng, **drawn):
    """Sizes of the collections, and the ledger at the end; staleness is checked on the way."""
    world = world_class(**drawn)
    world.behave = behave
    world.rewards.rule = lambda prompt: rng.choice([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    sizes, update = [], 0
    async with world.running() as producer:
        while (collection := await world.take(update)) is not None:
            for group in collection.groups:
                assert update - group.oldest.update <= world.settings.max_staleness
            ids = [group.prompt.id for group in collection.groups]
            assert ids == sorted(set(ids))
            sizes.append(len(ids))
            await world.time.run_for(rng.choice([0.0, 0.3, 3.0]))
            outstanding = producer.occupancy()["groups_outstanding"]
            assert outstanding <= world.settings.max_admitted_groups
            update += world.settings.updates_per_collection
            world.consume(collection, update)
            world.publish(update)
        assert producer.occupancy()["groups_outstanding"] == 0
    world.ledger.check()
    return sizes, world.ledger.counts()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), max_staleness=st.integers(1, 3))
def test_a_prompt_is_sent_back_as_too_old_at_most_once(
    world_class, outcome_class, seed, max_staleness
):
    rng = random.Random(seed)
    slow = {rng.randrange(40) for _ in range(6)}

    def behave(request):
        index = int(request.rid.split("-")[1].split(":")[1])
        return outcome_class(seconds=8.0 if index in slow else rng.uniform(0.2, 1.0))

    async def run():
        world = world_class(num_prompts=40, max_staleness=max_staleness)
        world.behave = behave
        async with world.running():
            taken = await world.train(40, seconds=0.5)
        return [group.attempt for collection in taken for group in collection.groups]

    attempts = asyncio.run(run())
    assert len(attempts) == 40
    assert max(attempts) <= 2, "nothing failed here: a second attempt is one the trainer waits for"
