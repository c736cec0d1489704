"""Publications that take engine by engine, and pauses of a refresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio
import pytest

from runtime.errors import PublicationFailed, TrainerLost, WaitTimeout
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.decision import read_decisions
from runtime.publication.disk import DiskTransport
from runtime.publication.pausing import plan_pause
from runtime.publication.transaction import Publisher
from tests.runtime.publication.tiny_engines import (
    INFO,
    Faults,
    Journal,
    TinyEngine,
    TinyTrainer,
    target,
)

P1, P2 = PolicyId(1, 1), PolicyId(1, 2)


class House:
    def __init__(self, tmp_path, num_engines: int = 3) -> None:
        self.journal = Journal()
        self.faults = Faults()
        self.engines = [TinyEngine(i, self.journal) for i in range(num_engines)]
        self.trainer = TinyTrainer()
        self.record_path = tmp_path / "publications.jsonl"
        self.publisher = Publisher(
            transport=DiskTransport(self.trainer, tmp_path),
            kill=self.kill,
            record_path=self.record_path,
        )

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        self.journal.add("kill", slot)
        self.engines[slot].is_dead = True

    async def rest(self, one) -> None:
        self.journal.add("rest", one.slot)
        self.engines[one.slot].running = 0

    def decided(self, policy: PolicyId, targets) -> None:
        (one,) = targets
        self.journal.add(f"serve {policy}", one.slot)

    async def roll(self, policy: PolicyId, rest: Callable | None = None):
        self.trainer.update = policy.update
        targets = [target(e, self.faults) for e in self.engines if not e.is_dead]
        return await self.publisher.publish(
            policy, targets, mode="rolling", rest=rest or self.rest, decided=self.decided
        )


def test_only_one_engine_at_a_time_stands_still(tmp_path):
    async def main():
        home = House(tmp_path)
        decision = await home.roll(P1)
        assert [v.slot for v in decision.verified] == [0, 1, 2]
        assert decision.mode == "rolling"
        steps = ["rest", "pause", "load", "set_policy", "serve e1.u1", "resume"]
        assert home.journal.events == [(step, slot) for slot in range(3) for step in steps]
        assert all(e.num_flushed == 1 for e in home.engines)
        assert decision.pause_s is not None
        assert read_decisions(home.record_path) == [decision]

    anyio.run(main)


@pytest.mark.parametrize("call", ["update_from_disk", "checksums", "set_policy", "resume"])
def test_a_later_engine_that_fails_is_gone_and_the_rest_go_on(tmp_path, call):
    async def main():
        home = House(tmp_path)
        await home.roll(P1)
        home.faults.plan[1, call] = "refuse"
        decision = await home.roll(P2)
        assert [v.slot for v in decision.verified] == [0, 2]
        assert [(f.slot, f.killed) for f in decision.failed] == [(1, True)]
        assert home.publisher.published == P2
        assert [e.says for e in home.engines if not e.is_dead] == ["e1.u2", "e1.u2"]
        # It never served again.
        after = home.journal.events[home.journal.events.index(("kill", 1)) :]
        assert ("resume", 1) not in after

    anyio.run(main)


@pytest.mark.parametrize("kind", ["refuse", "torn"])
def test_when_the_first_engine_fails_the_others_serve_the_old_policy_on(tmp_path, kind):
    async def main():
        home = House(tmp_path)
        await home.roll(P1)
        home.faults.plan[0, "update_from_disk"] = kind
        home.journal.events.clear()
        with pytest.raises(PublicationFailed):
            await home.roll(P2)
        assert home.journal.of("kill") == [0]
        assert not home.journal.of("pause") or set(home.journal.of("pause")) == {0}
        assert home.publisher.published == P1
        assert not home.publisher.is_halted
        assert [(e.says, e.paused) for e in home.engines[1:]] == [("e1.u1", None)] * 2
        decision = await home.roll(P2)
        assert [v.slot for v in decision.verified] == [1, 2]

    anyio.run(main)


def test_an_engine_that_does_not_come_to_rest_is_left_as_it_was(tmp_path):
    async def main():
        home = House(tmp_path)
        await home.roll(P1)
        home.journal.events.clear()

        async def busy(one) -> None:
            raise WaitTimeout("requests of engine 0 did not end")

        with pytest.raises(WaitTimeout):
            await home.roll(P2, busy)
        assert home.journal.events == []
        assert home.publisher.published == P1
        await home.roll(P2)

    anyio.run(main)


def test_a_lost_trainer_ends_the_roll_with_its_own_error(tmp_path):
    async def main():
        home = House(tmp_path)

        async def lost(snapshot, targets, *, flush, deadline_s):
            raise TrainerLost("rank 0 is gone")

        home.publisher._transport.transfer = lost
        with pytest.raises(TrainerLost):
            await home.roll(P1)
        # Paused and perhaps half loaded: it must not be found by whoever comes next.
        assert home.journal.of("kill") == [0]

    anyio.run(main)


def test_a_collective_cannot_roll(tmp_path):
    async def main():
        publisher = Publisher(
            transport=BroadcastTransport(TinyTrainer()), kill=None, record_path=tmp_path / "p"
        )
        with pytest.raises(ValueError, match="rolling"):
            await publisher.publish(P1, [], mode="rolling", rest=lambda one: None)

    anyio.run(main)


ALLOWED = {("in_place", False), ("retract", False), ("abort", False), ("abort", True)}


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("mode", ["refresh", "drain", "rolling"])
@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("forgets", [True, False])
def test_old_keys_are_never_served_as_new(pause, mode, spans, forgets):
    plan = plan_pause(replace(INFO, native_spans=spans, forgets_prefixes=forgets), mode, pause)
    assert (plan.pause, plan.flush) in ALLOWED
    # Requests stay inside only where each token's policy is told and old prefixes cannot be hit.
    assert plan.pause == "abort" or (spans and forgets and mode == "refresh")
    # An engine that keeps prefixes over a change of weights is flushed.
    assert forgets or plan.flush
    if spans and forgets and mode == "refresh":
        assert plan.pause == pause
