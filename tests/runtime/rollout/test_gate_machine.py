"""The gate against small models: any order of calls, cancellations and closings; and of
evaluations, publications and deadlines."""

import asyncio

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.clock import ManualClock
from runtime.rollout.gate import AdmissionGate
from tests.runtime.rollout.world import VirtualTime


class GateMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.never = self.runner.run(self._make_event())
        self.gate = AdmissionGate(clock=ManualClock(), sleep=self._sleep_for_ever)
        self.is_open = True
        self.inside, self.waiting = [], []
        self.calls, self.places, self.cancelled = {}, {}, set()
        self.closing = None
        self.cut = []

    async def _make_event(self):
        return anyio.Event()

    async def _sleep_for_ever(self, seconds):
        await self.never.wait()

    def _settle(self):
        async def settle():
            for _ in range(6):
                await asyncio.sleep(0)

        self.runner.run(settle())

    @rule()
    def call(self):
        name = len(self.calls)

        async def enter():
            self.places[name] = await self.gate.enter(lambda: self.cut.append(name))

        async def start():
            self.calls[name] = asyncio.create_task(enter())

        self.runner.run(start())
        self._settle()
        (self.inside if self.is_open else self.waiting).append(name)

    @rule(data=st.data())
    @precondition(lambda self: self.inside)
    def answer(self, data):
        name = data.draw(st.sampled_from(self.inside))
        self.inside.remove(name)
        self.gate.leave(self.places.pop(name))
        self._settle()

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def cancel_waiting(self, data):
        name = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(name)
        self.calls[name].cancel()
        self.cancelled.add(name)
        self._settle()

    @rule()
    @precondition(lambda self: self.closing is None)
    def close(self):
        async def start():
            self.closing = asyncio.create_task(
                self.gate.close(drain_deadline_s=1, reason="evaluation")
            )

        self.runner.run(start())
        self._settle()
        self.is_open = False

    @rule(cancels_one=st.booleans())
    @precondition(lambda self: self.closing is None or self.closing.done())
    def open(self, cancels_one):
        self.gate.open()
        granted, self.waiting = self.waiting, []
        if cancels_one and granted and not self.is_open:
            # Cancelled between the grant and its own next step: the place may not leak.
            name = granted.pop(0)
            self.calls[name].cancel()
            self.cancelled.add(name)
        self._settle()
        self.inside += granted
        self.is_open = True
        self.closing = None

    @invariant()
    def agrees_with_the_model(self):
        assert self.gate.is_open == self.is_open
        assert (self.gate.active, self.gate.waiters) == (len(self.inside), len(self.waiting))
        assert set(self.places) == set(self.inside)
        if self.closing is not None:
            assert self.closing.done() == (not self.inside or self.is_open)
        assert not self.cut

    def teardown(self):
        async def end():
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.runner.run(end())
        self.runner.close()


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


DRAIN_S = 10.0


class TurnsMachine(RuleBasedStateMachine):
    """Evaluations and publications take turns; calls run out, or are cut at the deadline."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.time = VirtualTime()
        self.gate = AdmissionGate(clock=self.time, sleep=self.time.sleep)
        self.calls, self.answers, self.cut = {}, {}, []
        self.inside, self.waiting, self.expected_cut = [], [], []
        self.turn, self.queue = None, []
        self.is_open, self.open_s = True, 0.0
        self.draining_since = None
        self.seen = []
        """Turns that have begun their work, as the gate let them."""
        self.begun = []
        self.ends = {}

    def do(self, action):
        async def run():
            result = action()
            await self.time.run_for(0)
            return result

        return self.runner.run(run())

    # --- Training calls -------------------------------------------------------------------------

    @rule()
    def call(self):
        name = len(self.calls)
        self.calls[name] = self.do(lambda: asyncio.create_task(self._call(name)))
        (self.inside if self.is_open else self.waiting).append(name)

    async def _call(self, name):
        self.answers[name] = anyio.Event()
        with anyio.CancelScope() as scope:

            def cut():
                self.cut.append(name)
                scope.cancel()

            place = await self.gate.enter(cut)
            try:
                await self.answers[name].wait()
            finally:
                self.gate.leave(place)

    @rule(data=st.data())
    @precondition(lambda self: self.inside)
    def answer(self, data):
        name = data.draw(st.sampled_from(self.inside))
        self.do(self.answers[name].set)
        self.inside.remove(name)
        self.drained()

    @rule(data=st.data())
    @precondition(lambda self: self.inside or self.waiting)
    def cancel(self, data):
        name = data.draw(st.sampled_from(self.inside + self.waiting))
        self.do(self.calls[name].cancel)
        (self.inside if name in self.inside else self.waiting).remove(name)
        self.drained()

    # --- Turns ----------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["evaluation", "publication"]))
    @precondition(lambda self: len(self.queue) < 2)
    def ask_for_a_turn(self, kind):
        name = (kind, len(self.ends))
        self.queue.append(name)
        self.ends[name] = []
        self.do(lambda: asyncio.create_task(self._turn(name)))
        self.next_turn()

    async def _turn(self, name):
        turn = (
            self.gate.evaluation(drain_deadline_s=DRAIN_S, max_calls=1)
            if name[0] == "evaluation"
            else self.gate.publication()
        )
        try:
            async with turn:
                self.begun.append(name)
                end = anyio.Event()
                self.ends[name].append(end)
                await end.wait()
                if len(self.ends[name]) > 1:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    @rule(succeeds=st.booleans())
    @precondition(lambda self: self.turn is not None and self.draining_since is None)
    def end_turn(self, succeeds):
        end = self.ends[self.turn][0]
        if not succeeds:
            self.ends[self.turn].append(None)
        self.do(end.set)
        if self.turn[0] == "evaluation" and succeeds:
            self.open_again()
        self.turn = None
        self.next_turn()

    @rule()
    @precondition(lambda self: self.turn is None and not self.is_open)
    def session_gives_the_evaluation_up(self):
        self.do(self.gate.open)
        self.open_again()

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]))
    def time_passes(self, seconds):
        self.runner.run(self.time.run_for(seconds))
        self.open_s += seconds if self.is_open else 0.0
        since = self.draining_since
        if since is not None and self.time.monotonic() - since >= DRAIN_S:
            self.expected_cut += self.inside
            self.inside = []
            self.drained()

    # --- The model ------------------------------------------------------------------------------

    def next_turn(self):
        if self.turn is None and self.queue:
            self.turn = self.queue.pop(0)
            if self.turn[0] == "evaluation":
                self.is_open = False
                self.draining_since = self.time.monotonic()
                self.drained()
            else:
                self.seen.append(self.turn)

    def drained(self):
        if self.draining_since is not None and not self.inside:
            self.draining_since = None
            self.seen.append(self.turn)

    def open_again(self):
        self.is_open = True
        self.inside += self.waiting
        self.waiting = []

    @invariant()
    def agrees_with_the_model(self):
        assert self.gate.is_open == self.is_open
        assert (self.gate.active, self.gate.waiters) == (len(self.inside), len(self.waiting))
        assert self.begun == self.seen, "one turn at a time, in order, evaluation once drained"
        assert self.cut == self.expected_cut, "at the deadline, and only those inside"
        assert self.gate.open_seconds() == self.open_s

    def teardown(self):
        async def end():
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.runner.run(end())
        self.runner.close()


TestTurnsMachine = TurnsMachine.TestCase
TestTurnsMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
