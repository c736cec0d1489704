"""The pool against a model, under any order of reports, timely and late ones."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.clock import ManualClock
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, EngineInfo
from runtime.engines.slots import TRANSITIONS, SlotState
from runtime.errors import ContractViolation, UnavailableError
from runtime.policy import PolicyId
from runtime.telemetry.events import Event

S = SlotState
SLOTS = 3
INFO = EngineInfo(
    version="1", vocab_size=8, context_length=8, max_running_requests=8, native_spans=True,
    takes_salt=True, update_bracket=False,
)  # fmt: skip


class Client:
    """Keeps the property that a client can be closed, and that somebody must do it."""

    def __init__(self):
        self.is_closed = False

    async def close(self):
        self.is_closed = True


@dataclass
class Model:
    """What is true of one slot."""

    state: SlotState = S.STARTING
    incarnation: str | None = None
    policy: PolicyId | None = None
    active: int = 0


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = EnginePool(SLOTS, clock=ManualClock())
        self.slots = [Model() for _ in range(SLOTS)]
        self.past = [["never"] for _ in range(SLOTS)]
        self.served = ()
        self.routes = []
        self.count = 0
        self.deaths = []
        self.pool.listen(
            lambda event, fields: (
                self.deaths.append((fields["slot"], fields["incarnation"]))
                if event is Event.ENGINE_DIED
                else None
            )
        )

    slot = st.integers(0, SLOTS - 1)
    policy = st.builds(PolicyId, st.just(1), st.integers(0, 3))

    def moves(self, slot, state):
        """Make the move in the model; False where the pool must refuse it."""
        if state not in TRANSITIONS[self.slots[slot].state]:
            return False
        self.slots[slot].state = state
        if state in (S.DEAD, S.RETIRED):
            self.slots[slot] = Model(state)
        return True

    def incarnation(self, slot, is_late):
        present = self.slots[slot].incarnation
        return self.past[slot][-1] if is_late or present is None else present

    @rule(slot=slot)
    def join(self, slot):
        self.count += 1
        name = f"i{self.count}"
        address = EngineAddress(slot=slot, incarnation=name, url="http://x", pid=1)
        if self.moves(slot, S.STALE):
            self.pool.joined(address, INFO, Client())
            self.slots[slot].incarnation = name
        else:
            with pytest.raises(ContractViolation):
                self.pool.joined(address, INFO, Client())

    @rule(slot=slot, policy=policy, is_late=st.booleans())
    def verify(self, slot, policy, is_late):
        name = self.incarnation(slot, is_late)
        model = self.slots[slot]
        is_present = name == model.incarnation
        assert self.pool.mark_verified(slot, name, policy) == is_present
        if is_present:
            model.policy = policy
            if model.state is S.STALE:
                model.state = S.HEALTHY

    @rule(slot=slot, is_late=st.booleans(), recovers=st.booleans())
    def probe(self, slot, is_late, recovers):
        name = self.incarnation(slot, is_late)
        model = self.slots[slot]
        before, after = (S.SUSPECT, S.HEALTHY) if recovers else (S.HEALTHY, S.SUSPECT)
        counts = name == model.incarnation and model.state is before
        told = (
            self.pool.mark_recovered(slot, name)
            if recovers
            else self.pool.mark_suspect(slot, name, "missed")
        )
        assert told == counts
        if counts:
            model.state = after

    @rule(slot=slot, is_late=st.booleans())
    def die(self, slot, is_late):
        name = self.incarnation(slot, is_late)
        is_present = name == self.slots[slot].incarnation
        before = len(self.deaths)
        assert self.pool.mark_dead(slot, name, "killed") == is_present
        if is_present:
            self.past[slot].append(name)
            self.moves(slot, S.DEAD)
            assert self.deaths[before:] == [(slot, name)]

    @rule(slot=slot)
    @precondition(lambda self: any(m.state is S.DEAD for m in self.slots))
    def restart(self, slot):
        if self.moves(slot, S.RESTARTING):
            self.pool.restarting(slot)
        else:
            with pytest.raises(ContractViolation):
                self.pool.restarting(slot)

    @rule(slot=slot, chance=st.integers(0, 9))
    def retire(self, slot, chance):
        if chance:
            return  # now and then only, or nothing else is seen
        if self.slots[slot].incarnation is not None:
            self.past[slot].append(self.slots[slot].incarnation)
        self.moves(slot, S.RETIRED)
        self.pool.retire(slot, "given up")

    @rule(policy=policy, also=st.none() | policy)
    def serve(self, policy, also):
        self.pool.serve(policy, also=also)
        self.served = (policy,) if also is None else (policy, also)

    @rule(samples=st.integers(1, 4), sticks=st.booleans())
    def call(self, samples, sticks):
        prefer = self.routes[-1][0] if sticks and self.routes else None
        ready = [
            (i, m)
            for i, m in enumerate(self.slots)
            if m.policy in self.served and m.state in (S.HEALTHY, S.SUSPECT)
        ]
        assert self.pool.is_available == bool(ready)
        if not ready:
            with pytest.raises(UnavailableError):
                self.pool.choose(prefer)
            return
        route = self.pool.choose(prefer)
        chosen = self.slots[route.slot]
        assert (route.incarnation, route.policy) == (chosen.incarnation, chosen.policy)
        assert (route.slot, chosen) in ready
        healthy = [m for _, m in ready if m.state is S.HEALTHY]
        assert chosen.state is S.HEALTHY or not healthy
        if prefer is None or prefer.incarnation != route.incarnation:
            same = [m for _, m in ready if m.state is chosen.state and m.policy == chosen.policy]
            assert chosen.active == min(m.active for m in same)
        self.pool.enter(route, samples)
        chosen.active += samples
        self.routes.append((route, samples))

    @rule(data=st.data())
    @precondition(lambda self: self.routes)
    def answer(self, data):
        route, samples = self.routes.pop(data.draw(st.integers(0, len(self.routes) - 1)))
        self.pool.leave(route, samples)
        if self.slots[route.slot].incarnation == route.incarnation:
            self.slots[route.slot].active -= samples

    @invariant()
    def agrees_with_the_model(self):
        seen = [(v.state, v.incarnation, v.policy, v.active_samples) for v in self.pool.views()]
        assert seen == [(m.state, m.incarnation, m.policy, m.active) for m in self.slots]
        assert {e.incarnation for e in self.pool.live()} == {
            m.incarnation for m in self.slots if m.incarnation is not None
        }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.anyio
async def test_clients_of_lost_incarnations_are_closed():
    pool = EnginePool(1, clock=ManualClock())
    lost, present = Client(), Client()
    pool.joined(EngineAddress(slot=0, incarnation="a", url="http://x", pid=1), INFO, lost)
    pool.mark_dead(0, "a", "killed")
    await pool.close_left()
    assert lost.is_closed
    pool.restarting(0)
    pool.joined(EngineAddress(slot=0, incarnation="b", url="http://x", pid=1), INFO, present)
    await pool.close_left()
    assert not present.is_closed
    await pool.close()
    assert present.is_closed


def test_a_rolling_publication_keeps_traffic_on_engines_whose_turn_has_not_come():
    pool = EnginePool(2, clock=ManualClock())
    old, new = PolicyId(1, 0), PolicyId(1, 1)
    for slot in range(2):
        address = EngineAddress(slot=slot, incarnation="a", url="http://x", pid=1)
        pool.joined(address, INFO, Client())
        pool.mark_verified(slot, "a", old)
    pool.serve(new, also=old)
    assert pool.choose().policy == old
    pool.mark_verified(0, "a", new)
    assert pool.choose().policy == new, "the newest first"
    pool.serve(new)
    assert pool.choose().slot == 0
