import anyio
import pytest

from runtime.errors import ContractViolation
from runtime.rollout.gate import AdmissionGate
from runtime.telemetry.events import Event

pytestmark = pytest.mark.anyio


class Callers:
    """Training calls that stay inside until told to answer; a cut cancels the call."""

    def __init__(self, gate, tasks):
        self.gate = gate
        self.tasks = tasks
        self.inside, self.cut = [], []
        self._answers = {}

    def call(self, name):
        self._answers[name] = anyio.Event()
        self.tasks.start_soon(self._call, name)

    def answer(self, name):
        self._answers[name].set()

    async def _call(self, name):
        with anyio.CancelScope() as scope:

            def cut():
                self.cut.append(name)
                scope.cancel()

            place = await self.gate.enter(cut)
            self.inside.append(name)
            try:
                await self._answers[name].wait()
            finally:
                self.inside.remove(name)
                self.gate.leave(place)


@pytest.fixture
def time(virtual_time_class):
    return virtual_time_class()


@pytest.fixture
def gate(time):
    return AdmissionGate(clock=time, sleep=time.sleep)


async def test_waiting_calls_enter_in_order_when_it_opens(gate, time):
    async with anyio.create_task_group() as tasks:
        callers = Callers(gate, tasks)
        await gate.close(drain_deadline_s=10, reason="evaluation")
        for name in "abc":
            callers.call(name)
            await time.run_for(0)
        assert (callers.inside, gate.waiters, gate.active) == ([], 3, 0)
        gate.open()
        await time.run_for(0)
        assert (callers.inside, gate.waiters, gate.active) == (["a", "b", "c"], 0, 3)
        for name in "abc":
            callers.answer(name)
    assert gate.active == 0


async def test_closing_waits_for_calls_inside_and_lets_nobody_in(gate, time):
    async with anyio.create_task_group() as tasks:
        callers = Callers(gate, tasks)
        callers.call("first")
        await time.run_for(0)
        cut = []
        tasks.start_soon(close_into, gate, cut)
        await time.run_for(5)
        callers.call("late")
        await time.run_for(0)
        assert (cut, callers.inside, gate.waiters) == ([], ["first"], 1)
        callers.answer("first")
        await time.run_for(0)
        assert cut == [0]
        tasks.cancel_scope.cancel()


async def close_into(gate, cut):
    cut.append(await gate.close(drain_deadline_s=10, reason="evaluation"))


async def test_stragglers_are_cut_and_joined_at_the_deadline(gate, time):
    async with anyio.create_task_group() as tasks:
        callers = Callers(gate, tasks)
        callers.call("quick")
        callers.call("slow")
        await time.run_for(0)
        cut = []
        tasks.start_soon(close_into, gate, cut)
        await time.run_for(3)
        callers.answer("quick")
        await time.run_for(6.9)
        assert cut == []
        await time.run_for(0.2)
        assert (cut, callers.cut, gate.active) == ([1], ["slow"], 0)


async def test_it_opens_after_a_successful_evaluation_and_stays_shut_after_a_failed_one(gate, time):
    events = []
    gate.listen(lambda event, fields: events.append(event))
    async with gate.evaluation(drain_deadline_s=1, max_calls=2) as admission:
        assert not gate.is_open
        async with admission.call():
            assert admission.active == 1
    assert gate.is_open
    with pytest.raises(ZeroDivisionError):
        async with gate.evaluation(drain_deadline_s=1, max_calls=2):
            raise ZeroDivisionError
    assert not gate.is_open
    async with gate.evaluation(drain_deadline_s=1, max_calls=2):
        pass
    assert gate.is_open, "a retry that succeeds opens it"
    paused, resumed = Event.GENERATION_PAUSED, Event.GENERATION_RESUMED
    assert events == [paused, resumed, paused, resumed]


async def test_evaluation_calls_are_bounded_and_end_with_their_evaluation(gate, time):
    entered = []

    async def ask(admission, name):
        async with admission.call():
            entered.append(name)
            await time.sleep(1)

    async with (
        gate.evaluation(drain_deadline_s=1, max_calls=2) as admission,
        anyio.create_task_group() as tasks,
    ):
        for name in range(3):
            tasks.start_soon(ask, admission, name)
        await time.run_for(0.5)
        assert sorted(entered) == [0, 1]
        await time.run_for(2)
    assert sorted(entered) == [0, 1, 2]
    with pytest.raises(ContractViolation):
        async with admission.call():
            pass


async def test_a_publication_and_a_shared_evaluation_never_coincide(gate, time):
    log = []

    async def publish():
        async with gate.publication():
            log.append("publishing")
            await time.sleep(2)
            log.append("published")

    async def evaluate():
        async with gate.evaluation(drain_deadline_s=1, max_calls=1):
            log.append("evaluating")
            await time.sleep(2)
            log.append("evaluated")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await time.run_for(1)
        tasks.start_soon(evaluate)
        await time.run_for(0.5)
        assert gate.is_open, "it is not even shut while the publication has its turn"
        await time.run_for(1)
        tasks.start_soon(publish)
        await time.run_for(10)
    assert log == [
        "publishing", "published", "evaluating", "evaluated", "publishing", "published",
    ]  # fmt: skip


async def test_time_counts_only_while_it_is_open(gate, time):
    await time.run_for(5)
    await gate.close(drain_deadline_s=1, reason="evaluation")
    await time.run_for(100)
    assert gate.open_seconds() == 5
    gate.open()
    await time.run_for(2)
    assert gate.open_seconds() == 7
