"""Engines brought to rest before a transfer, each in its way, and the decision told meanwhile."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from runtime.errors import (
    PublicationFailed,
    WaitTimeout,
)
from tests.runtime.publication.tiny_engines import (
    INFO,
)
from tests.runtime.publication.tiny_house import P1, SHORT


def test_drain_waits_for_running_requests_and_flushes(house):
    async def main():
        home = house(2)
        order = home.journal

        async def drain():
            order.add("drained", -1)
            for engine in home.engines:
                engine.running = 0

        decision = await home.publish(P1, mode="drain", drain=drain)
        assert order.events[0] == ("drained", -1)
        assert [v.pause for v in decision.verified] == ["abort", "abort"]
        assert [e.num_flushed for e in home.engines] == [1, 1]

    anyio.run(main)


def test_a_drain_that_does_not_end_changes_nothing(house):
    async def main():
        home = house(1, limits=SHORT)
        with pytest.raises(WaitTimeout, match=r"running requests to end before e1\.u1"):
            await home.publish(P1, mode="drain", drain=anyio.sleep_forever)
        assert home.journal.events == []
        assert not home.publisher.is_halted

    anyio.run(main)


def test_halted_engines_are_not_drained_again(house):
    async def main():
        home = house(1)

        async def drained():
            pass

        home.faults.plan[0, "checksums"] = "refuse"
        with pytest.raises(PublicationFailed):
            await home.publish(P1, mode="drain", drain=drained)
        home.faults.plan.clear()
        # Requests in paused engines would never end: a second drain would run into its limit.
        await home.publish(P1, mode="drain", drain=anyio.sleep_forever)
        assert home.serves(home.engines[0], P1)

    anyio.run(main)


def test_engines_of_different_abilities_are_each_paused_in_their_way(house):
    async def main():
        no_spans = replace(INFO, native_spans=False)
        neither = replace(INFO, native_spans=False, forgets_prefixes=False)
        # A salt does not help: a request that waited for the swap brings the old policy's.
        only_salted = replace(INFO, forgets_prefixes=False)
        home = house(4, infos=[INFO, no_spans, neither, only_salted])
        decision = await home.publish(P1)
        assert [(v.pause, v.flushed) for v in decision.verified] == [
            ("in_place", False), ("abort", False), ("abort", True), ("abort", True),
        ]  # fmt: skip
        assert [e.num_flushed for e in home.engines] == [0, 0, 1, 1]
        assert [e.running for e in home.engines] == [1, 0, 0, 0]

    anyio.run(main)


def test_the_decision_is_told_while_every_engine_still_stands_paused(house):
    """Or a request between the two would reach new weights with the old policy as its salt."""

    async def main():
        home = house(3)
        home.faults.plan[1, "checksums"] = "refuse"
        told = []

        def decided(policy, verified):
            paused = [home.engines[target.slot].paused is not None for target in verified]
            told.append((policy, [target.slot for target in verified], paused))

        await home.publish(P1, decided=decided)
        assert told == [(P1, [0, 2], [True, True])]

    anyio.run(main)
