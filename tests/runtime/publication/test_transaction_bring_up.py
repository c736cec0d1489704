"""A single engine brought to the published policy: after a restart, or to be mended."""

from __future__ import annotations

import anyio
import pytest

from runtime.errors import (
    PublicationFailed,
)
from tests.runtime.publication.tiny_engines import (
    TinyEngine,
    target,
)
from tests.runtime.publication.tiny_house import P1, P2


def test_a_restarted_engine_is_brought_to_the_published_policy(house):
    async def main():
        home = house(2)
        await home.publish(P1)
        home.trainer.update = 7  # training has gone on; the snapshot has not
        fresh = TinyEngine(1, home.journal)
        decision = await home.publisher.bring_up(target(fresh), P1)
        assert decision.kind == "bring_up"
        assert decision.policy == "e1.u1"
        assert home.serves(fresh, P1)
        assert home.trainer.num_exports == 1

    anyio.run(main)


def test_bring_up_during_a_publication_arrives_at_the_newer_policy(house):
    async def main():
        home = house(1)
        await home.publish(P1)
        fresh = TinyEngine(1, home.journal)
        got = []

        async def join():
            got.append(await home.publisher.bring_up(target(fresh), P1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(home.publish, P2)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(join)
        assert got[0].policy == "e1.u2"
        assert home.serves(fresh, P2)

    anyio.run(main)


def test_a_failed_bring_up_ends_that_engine_and_no_other(house):
    async def main():
        home = house(2)
        await home.publish(P1)
        home.faults.plan[1, "update_from_disk"] = "torn"
        with pytest.raises(PublicationFailed):
            await home.publisher.bring_up(target(home.engines[1], home.faults), P1)
        assert home.journal.of("kill") == [1]
        assert home.publisher.published == P1
        assert not home.publisher.is_halted
        assert home.serves(home.engines[0], P1)

    anyio.run(main)


@pytest.mark.parametrize("stage", ["pause", "update_from_disk", "checksums", "set_policy"])
def test_a_failed_mend_ends_that_engine_and_halts_nothing(house, stage):
    async def main():
        home = house(2)
        await home.publish(P1)
        home.faults.plan[1, stage] = "refuse"
        with pytest.raises(PublicationFailed):
            await home.publisher.mend(target(home.engines[1], home.faults), P1)
        assert home.journal.of("kill") == [1]
        assert home.publisher.published == P1
        assert not home.publisher.is_halted
        assert home.serves(home.engines[0], P1)
        with pytest.raises(PublicationFailed, match="published is"):
            await home.publisher.mend(target(home.engines[0]), P2)

    anyio.run(main)


def test_bring_up_is_refused_before_anything_is_published_and_while_halted(house):
    async def main():
        home = house(1)
        with pytest.raises(PublicationFailed, match="published is None"):
            await home.publisher.bring_up(target(home.engines[0]), P1)
        home.faults.plan[0, "checksums"] = "refuse"
        with pytest.raises(PublicationFailed):
            await home.publish(P1)
        with pytest.raises(PublicationFailed, match="waits for its retry"):
            await home.publisher.bring_up(target(home.engines[0]), P1)

    anyio.run(main)


def test_bring_up_never_goes_back_to_an_older_policy(house):
    async def main():
        home = house(1)
        await home.publish(P1)
        with pytest.raises(PublicationFailed, match=r"asks for e1\.u2; published is e1\.u1"):
            await home.publisher.bring_up(target(home.engines[0]), P2)
        assert home.journal.of("kill") == []

    anyio.run(main)
