"""The gate against a model of ten lines, under any order of calls, cancellations and closings."""

import asyncio

import anyio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.clock import ManualClock
from runtime.rollout.gate import AdmissionGate


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
