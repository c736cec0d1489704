"""Publications, restarts and joins in any order, with faults in any call, against a small model."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import PublicationFailed
from runtime.policy import PolicyId
from runtime.publication.decision import read_decisions
from runtime.publication.disk import DiskTransport
from runtime.publication.protocol import Target
from runtime.publication.transaction import Publisher
from tests.runtime.publication.tiny_engines import Faults, Journal, TinyEngine, TinyTrainer

SLOTS = 3
BEFORE_DECISION = ("pause", "update_from_disk", "checksums", "set_policy", "policy")


class PublicationMachine(RuleBasedStateMachine):
    """The model: who lives, what is published, and whether the last try was left undecided."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp())
        self.record_path = self.folder / "publications.jsonl"
        self.journal, self.faults = Journal(), Faults()
        self.trainer = TinyTrainer()
        self.engines = {}
        self.count = 0
        self.publisher = Publisher(
            transport=DiskTransport(self.trainer, self.folder),
            kill=self.kill,
            record_path=self.record_path,
            stage_log=lambda _: None,
        )
        self.published, self.is_halted = None, False
        self.fresh, self.killed = set(), set()
        self.tries = []
        for slot in range(SLOTS):
            self.restart(slot)

    async def kill(self, slot, incarnation, reason):
        self.journal.add("kill", slot)
        name, engine = self.engines[slot]
        assert (name, slot in self.killed) == (incarnation, False), "killed once, and no other"
        self.killed.add(slot)
        engine.is_dead = True

    def live(self):
        """As the session sees it: one that died by itself is still thought to live."""
        return [slot for slot in self.engines if slot not in self.killed]

    def dead(self):
        return {slot for slot, (_, engine) in self.engines.items() if engine.is_dead}

    def target(self, slot):
        name, engine = self.engines[slot]
        return Target(slot=slot, incarnation=name, client=self.faults.wrap(engine))

    def bad(self, slots, calls):
        planned = {slot for (slot, call) in self.faults.plan if call in calls}
        return (planned | self.dead()) & set(slots)

    slot = st.integers(0, SLOTS - 1)

    # --- The world ------------------------------------------------------------------------------

    @rule(
        slot=slot,
        call=st.sampled_from([*BEFORE_DECISION, "resume"]),
        kind=st.sampled_from(["refuse", "lose", "bug"]),
    )
    def plan_fault(self, slot, call, kind):
        self.faults.plan[slot, call] = kind

    @rule()
    def heal(self):
        self.faults.plan.clear()

    @rule(slot=slot)
    def die(self, slot):
        """By itself; nobody has noticed yet."""
        self.engines[slot][1].is_dead = True

    @rule(slot=slot)
    @precondition(lambda self: self.killed)
    def restart(self, slot):
        if slot in self.live():
            return
        self.count += 1
        self.engines[slot] = (f"{slot}-{self.count}", TinyEngine(slot, self.journal))
        self.fresh.add(slot)
        self.killed.discard(slot)

    @rule()
    @precondition(lambda self: not self.is_halted)
    def train(self):
        """Weights change between publications only; while one waits for its retry they stand."""
        self.trainer.update += 1

    # --- Publications ---------------------------------------------------------------------------

    @rule(mode=st.sampled_from(["refresh", "drain"]))
    @precondition(lambda self: self.live())
    def publish(self, mode):
        policy = PolicyId(1, self.trainer.update)
        slots = self.live()
        out = self.bad(slots, BEFORE_DECISION)
        stuck = self.bad(slots, ["resume"]) - out
        begun = len(self.journal.events)
        done = self.call(
            self.publisher.publish(
                policy, [self.target(slot) for slot in slots], mode=mode, drain=self.drained
            )
        )
        events = self.journal.events[begun:]
        if not set(slots) - out:
            assert done is None
            assert not {what for what, _ in events} & {"kill", "resume"}
            self.is_halted = True
            return
        assert {v.slot for v in done.verified} == set(slots) - out - stuck
        assert {f.slot for f in done.failed} == out | stuck
        killed = [
            i
            for i, (what, slot) in enumerate(events)
            if (what, slot) in {("kill", slot) for slot in out}
        ]
        resumed = [i for i, (what, _) in enumerate(events) if what == "resume"]
        assert len(killed) == len(out)
        assert not (killed and resumed) or max(killed) < min(resumed)
        self.published, self.is_halted = policy, False
        self.fresh -= set(slots)
        assert set(self.live()) == set(slots) - out - stuck

    async def drained(self):
        pass

    @rule(slot=slot)
    @precondition(lambda self: self.fresh & set(self.live()))
    def bring_up(self, slot):
        """A restarted engine joins alone, from the snapshot that is kept."""
        if slot not in self.fresh & set(self.live()):
            return
        begun = len(self.journal.events)
        wanted = PolicyId(1, 0) if self.published is None else self.published
        done = self.call(self.publisher.bring_up(self.target(slot), wanted))
        events = self.journal.events[begun:]
        others = {s for _, s in events} - {slot}
        assert not others, "the others go on"
        if self.published is None or self.is_halted:
            assert done is None
            assert events == []
            self.tries.pop()  # refused before it began: there is nothing to record
            return
        self.fresh.discard(slot)
        if self.bad([slot], [*BEFORE_DECISION, "resume"]):
            assert slot not in self.live()
        else:
            assert (done.kind, done.policy) == ("bring_up", str(self.published))

    def call(self, what):
        """The decision, or None where it failed; every try is counted."""
        self.tries.append(what)

        async def run():
            return await what

        try:
            return self.runner.run(run())
        except PublicationFailed:
            return None

    # --- What always holds ----------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self):
        assert self.publisher.published == self.published
        assert self.publisher.is_halted == self.is_halted

    @invariant()
    def whoever_serves_serves_the_published_policy_exactly(self):
        for slot in set(self.live()) - self.fresh - self.dead():
            _, engine = self.engines[slot]
            if engine.paused is not None:
                assert self.is_halted
                continue
            assert engine.says == str(self.published)
            right = TinyTrainer()
            right.update = self.published.update
            assert all(engine.weights[n].equal(t) for n, t in right.weights().items())

    @invariant()
    def every_try_left_its_record(self):
        assert len(read_decisions(self.record_path)) == len(self.tries)

    def teardown(self):
        async def close():
            await self.publisher.close()

        self.runner.run(close())
        assert not [p for p in self.folder.iterdir() if p.is_dir()], "no snapshot is left"
        self.runner.close()
        shutil.rmtree(self.folder)


TestPublicationMachine = PublicationMachine.TestCase
TestPublicationMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_machine_would_see_a_publisher_that_resumes_what_it_did_not_verify(monkeypatch):
    """The model is worth something only if it can disagree."""
    from runtime.publication import swap

    monkeypatch.setattr(swap, "check_held", lambda *_: None)
    machine = PublicationMachine()
    machine.faults.plan[0, "update_from_disk"] = "torn"
    machine.faults.plan[1, "update_from_disk"] = "refuse"
    with pytest.raises(AssertionError):
        play(machine)


def play(machine):
    machine.publish("refresh")
    machine.whoever_serves_serves_the_published_policy_exactly()
