"""Publication as the session sees it: real pool and gate, a publisher that does what it is told."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runtime.clock import ManualClock, SystemClock
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress
from runtime.engines.slots import SlotState
from runtime.errors import EngineDead, EngineRefused, PublicationFailed, WaitTimeout
from runtime.policy import PolicyId
from runtime.publication.protocol import Target
from runtime.rollout.gate import AdmissionGate
from runtime.session import publishing
from runtime.session.publishing import Publishing
from tests.runtime.evaluation.asked import INFO

pytestmark = pytest.mark.anyio

FIRST, SECOND = PolicyId(1, 0), PolicyId(1, 1)


class Client:
    """Keeps: memory is given back under a pause by abort only, and taken again once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = ""

    async def pause(self, mode: str) -> None:
        self._called(f"pause {mode}")

    async def release_memory(self) -> None:
        assert self.calls[-1] == "pause abort"
        self._called("release")

    async def resume_memory(self) -> None:
        self._called("take")

    def _called(self, call: str) -> None:
        if call == self.refuses:
            raise EngineRefused(f"{call} refused")
        self.calls.append(call)

    async def close(self) -> None:
        pass


class Publisher:
    """Keeps: a failed publication halts it until one succeeds; decisions name the verified."""

    brings_up_one = True

    def __init__(self) -> None:
        self.is_halted = False
        self.fails = 0
        self.calls: Counter[str] = Counter()
        self.targets: list[int] = []

    async def publish(self, policy: PolicyId, targets: Sequence[Target], **options: Any) -> Any:
        self.calls["publish"] += 1
        if drain := options.get("drain"):
            await drain()
        decision = self._decide(policy, targets)
        options["decided"](policy, targets)
        return decision

    async def bring_up(self, target: Target, policy: PolicyId) -> Any:
        self.calls["bring_up"] += 1
        return self._decide(policy, [target], halts=False)

    async def mend(self, target: Target, policy: PolicyId) -> Any:
        self.calls["mend"] += 1
        return self._decide(policy, [target], halts=False)

    def _decide(self, policy: PolicyId, targets: Sequence[Target], *, halts: bool = True) -> Any:
        self.targets = [target.slot for target in targets]
        if self.fails:
            self.fails -= 1
            self.is_halted = halts or self.is_halted
            raise PublicationFailed("no engine was verified")
        self.is_halted = False
        verified = [SimpleNamespace(slot=t.slot, incarnation=t.incarnation) for t in targets]
        return SimpleNamespace(
            policy=str(policy), verified=verified, pause_s=0.0, num_bytes=0, stages_s={}
        )


class Monitor:
    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.kills: list[tuple[int, str]] = []
        self.pauses = 0
        self.lost_slots: list[int] = []
        self.exited: list[int] = []
        self.bury: Callable[[int], None] = lambda _slot: None

    async def bury_lost(self) -> list[int]:
        buried, self.exited = self.exited, []
        for slot in buried:
            self.bury(slot)
        return buried

    def pause(self, slot: int | None = None) -> None:
        self.pauses += 1

    def resume(self, slot: int | None = None) -> None:
        self.pauses -= 1

    async def kill(self, slot: int, incarnation: str, reason: str) -> None:
        self.kills.append((slot, reason))
        self.pool.mark_dead(slot, incarnation, reason)


class Published:
    def __init__(self, mode: str = "refresh") -> None:
        self.clients: dict[int, Client] = {}
        self.pool = EnginePool(2, clock=ManualClock())
        self.gate = AdmissionGate(clock=SystemClock())
        self.publisher = Publisher()
        self.monitor = Monitor(self.pool)
        self.it = Publishing(
            publisher=self.publisher,  # type: ignore[arg-type]
            pool=self.pool,
            monitor=self.monitor,  # type: ignore[arg-type]
            gate=self.gate,
            mode=mode,  # type: ignore[arg-type]
            drain_deadline_s=5.0,
            lifecycle=SimpleNamespace(record=lambda *_, **__: None),  # type: ignore[arg-type]
        )
        self.join(0, "a")
        self.join(1, "b")

    def join(self, slot: int, incarnation: str) -> None:
        address = EngineAddress(slot=slot, incarnation=incarnation, url="", pid=1)
        self.clients[slot] = Client()
        self.pool.joined(address, INFO, self.clients[slot])  # type: ignore[arg-type]

    def states(self) -> list[tuple[SlotState, PolicyId | None]]:
        return [(view.state, view.policy) for view in self.pool.views()]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_MEND_POLL_S", 0.005)


async def test_every_living_engine_is_verified_and_then_served() -> None:
    published = Published()
    await published.it.publish(FIRST)
    assert published.states() == [(SlotState.HEALTHY, FIRST)] * 2
    assert published.pool.published == FIRST
    assert published.monitor.pauses == 0


async def test_a_failure_leaves_the_old_policy_published_and_the_monitor_at_work() -> None:
    published = Published()
    await published.it.publish(FIRST)
    published.publisher.fails = 1
    with pytest.raises(PublicationFailed):
        await published.it.publish(SECOND)
    assert published.pool.published == FIRST
    assert published.monitor.pauses == 0
    await published.it.publish(SECOND)
    assert published.pool.published == SECOND


async def test_the_retry_of_a_failed_publication_meets_no_engine_that_has_exited() -> None:
    published = Published()
    await published.it.publish(FIRST)
    published.publisher.fails = 1
    published.monitor.exited = [1]
    published.monitor.bury = lambda slot: published.pool.mark_dead(slot, "ab"[slot], "exited")
    with pytest.raises(PublicationFailed):
        await published.it.publish(SECOND)
    await published.it.publish(SECOND)
    assert published.publisher.targets == [0]


async def test_it_waits_while_every_engine_is_being_restarted() -> None:
    published = Published()
    published.pool.mark_dead(0, "a", "killed")
    published.pool.mark_dead(1, "b", "killed")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(published.it.publish, FIRST)
        await anyio.wait_all_tasks_blocked()
        assert published.publisher.calls["publish"] == 0
        published.pool.restarting(1)
        published.join(1, "c")
    assert published.publisher.targets == [1]
    assert published.pool.state(1) is SlotState.HEALTHY


@pytest.mark.parametrize("lost", [[0, 1], [1]])
async def test_an_engine_without_a_restart_left_holds_the_next_update(lost: list[int]) -> None:
    published = Published()
    for slot in lost:
        published.pool.mark_dead(slot, "ab"[slot], "killed")
    published.monitor.lost_slots = lost
    with pytest.raises(EngineDead, match="restart budget"):
        await published.it.publish(FIRST)
    assert published.publisher.calls["publish"] == 0


async def test_a_restarted_engine_is_mended_to_the_published_policy() -> None:
    published = Published()
    await published.it.publish(FIRST)
    published.pool.mark_dead(0, "a", "killed")
    published.pool.restarting(0)
    published.join(0, "c")
    assert published.pool.state(0) is SlotState.STALE
    await mended(published, until=lambda: published.pool.state(0) is SlotState.HEALTHY)
    assert published.states() == [(SlotState.HEALTHY, FIRST)] * 2
    assert published.publisher.targets == [0]


@pytest.mark.parametrize("brings_up_one", [True, False])
async def test_an_engine_that_cannot_be_mended_is_tried_again(brings_up_one: bool) -> None:
    published = Published()
    published.publisher.brings_up_one = brings_up_one
    await published.it.publish(FIRST)
    published.pool.mark_dead(0, "a", "killed")
    published.pool.restarting(0)
    published.join(0, "c")
    published.publisher.fails = 1
    await mended(published, until=lambda: published.pool.state(0) is SlotState.HEALTHY)
    assert published.publisher.calls["bring_up" if brings_up_one else "mend"] == 2
    assert not published.publisher.is_halted


async def test_an_engine_that_does_not_come_up_in_time_ends_no_session() -> None:
    published = Published()
    await published.it.publish(FIRST)
    published.pool.mark_dead(0, "a", "killed")
    published.pool.restarting(0)
    published.join(0, "c")
    bring_up, late = published.publisher.bring_up, [WaitTimeout("the transfer")]

    async def slow_once(target: Target, policy: PolicyId) -> Any:
        if late:
            raise late.pop()
        return await bring_up(target, policy)

    published.publisher.bring_up = slow_once  # type: ignore[method-assign]
    await mended(published, until=lambda: published.pool.state(0) is SlotState.HEALTHY)
    assert not late


async def test_nothing_is_mended_while_a_failed_publication_waits_for_its_retry() -> None:
    published = Published()
    await published.it.publish(FIRST)
    published.publisher.fails = 1
    with pytest.raises(PublicationFailed):
        await published.it.publish(SECOND)
    published.pool.mark_dead(0, "a", "killed")
    published.pool.restarting(0)
    published.join(0, "c")
    looks = Counter[str]()
    live = published.pool.live

    def counted() -> Any:
        looks["live"] += 1
        return live()

    published.pool.live = counted  # type: ignore[method-assign]
    await mended(published, until=lambda: looks["live"] > 3)
    assert published.publisher.calls["bring_up"] == 0
    await published.it.publish(SECOND)
    assert published.states() == [(SlotState.HEALTHY, SECOND)] * 2


async def test_draining_opens_the_gate_again_only_once_it_is_published() -> None:
    published = Published("drain")
    published.publisher.fails = 1
    with pytest.raises(PublicationFailed):
        await published.it.publish(FIRST)
    assert not published.gate.is_open
    await published.it.publish(FIRST)
    assert published.gate.is_open


async def test_a_publication_and_a_shared_evaluation_exclude_each_other() -> None:
    published = Published()
    await published.it.publish(FIRST)
    async with (
        anyio.create_task_group() as tasks,
        published.gate.evaluation(drain_deadline_s=5, max_calls=1),
    ):
        tasks.start_soon(published.it.publish, SECOND)
        await anyio.wait_all_tasks_blocked()
        assert published.pool.published == FIRST
    assert published.pool.published == SECOND


async def mended(published: Published, *, until: Any) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(published.it.mend_for_ever)
        with anyio.fail_after(20):
            while not until():  # noqa: ASYNC110  # a state of the pool has no event
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()


async def test_sleeping_engines_are_without_memory_for_the_length_of_an_update():
    published = Published()
    published.it.sleeps = True
    await published.it.publish(FIRST)
    async with published.it.changing_weights():
        for client in published.clients.values():
            assert client.calls == ["pause abort", "release"]
        assert published.monitor.pauses == 1  # they cannot answer probes
    async with published.it.changing_weights():
        pass  # the update was tried again: they are asleep already
    assert published.clients[0].calls == ["pause abort", "release"]

    published.publisher.fails = 1
    with pytest.raises(PublicationFailed):
        await published.it.publish(SECOND)
    await published.it.publish(SECOND)
    assert published.clients[1].calls == ["pause abort", "release", "take"]
    assert published.monitor.pauses == 0
    assert published.states() == [(SlotState.HEALTHY, SECOND)] * 2


@pytest.mark.parametrize(("refuses", "asleep"), [("release", True), ("take", False)])
async def test_an_engine_that_keeps_or_cannot_take_its_memory_is_ended(refuses: str, asleep: bool):
    published = Published()
    published.it.sleeps = True
    await published.it.publish(FIRST)
    published.clients[0].refuses = refuses
    async with published.it.changing_weights():
        assert bool(published.monitor.kills) is asleep
    await published.it.publish(SECOND)
    assert [slot for slot, _ in published.monitor.kills] == [0]
    assert published.publisher.targets == [1]
    assert published.monitor.pauses == 0


async def test_rolling_sends_no_new_work_to_the_engine_whose_turn_it_is() -> None:
    published = Published("rolling")
    pool, chosen = published.pool, []

    async def engine_by_engine(policy: PolicyId, targets: Sequence[Target], **options: Any) -> Any:
        for target in targets:
            route = pool.choose() if pool.is_available else None
            if route is not None:
                pool.enter(route, 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(options["rest"], target)
                await anyio.wait_all_tasks_blocked()
                if route is not None:
                    chosen.append((target.slot, pool.choose().slot))
                    pool.leave(route, 1)
            options["decided"](policy, [target])
        return published.publisher._decide(policy, targets)

    published.publisher.publish = engine_by_engine  # type: ignore[method-assign]
    await published.it.publish(FIRST)
    chosen.clear()
    await published.it.publish(SECOND)
    # While one rests the other serves, first at the old policy, then at the new one.
    assert chosen == [(0, 1), (1, 0)]
    assert published.states() == [(SlotState.HEALTHY, SECOND)] * 2
    assert published.gate.is_open


async def test_the_last_engine_is_not_taken_from_under_its_callers() -> None:
    published = Published("rolling")
    await published.it.publish(FIRST)
    assert published.pool.rest(0, "a")
    assert not published.pool.rest(1, "b")
    assert published.pool.choose().slot == 1
    assert published.pool.rest(1, "an earlier one")
    published.pool.end_rests()
    assert published.pool.rest(1, "b")
