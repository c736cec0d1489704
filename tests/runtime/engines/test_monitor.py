import itertools

import anyio
import pytest

from runtime.engines.health import HealthSettings
from runtime.engines.monitor import HealthMonitor
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, EngineInfo, EngineLoad
from runtime.engines.slots import SlotState
from runtime.errors import EngineDead, TransportError
from runtime.policy import PolicyId
from runtime.telemetry.events import Event
from tests.runtime.rollout.world import VirtualTime

pytestmark = pytest.mark.anyio

INFO = EngineInfo(
    version="1", vocab_size=8, context_length=8, max_running_requests=8, native_spans=True,
    takes_salt=True, update_bracket=False,
)  # fmt: skip


class Server:
    """One incarnation, as its client and its owner see it.

    Keeps of a real one: a hung server answers nothing until the caller's limit has passed; one that
    is busy with a long prefill misses probes while its token count grows.
    """

    def __init__(self, time, slot, incarnation):
        self.time = time
        self.slot = slot
        self.url = f"http://{slot}"
        self.address = EngineAddress(slot=slot, incarnation=incarnation, url=self.url, pid=1)
        self.mode = "well"
        self.exists = True
        self.probes = []
        self.is_closed = False

    async def info(self):
        return INFO

    async def is_alive(self, *, timeout_s):
        self.probes.append(self.time.monotonic())
        if self.mode == "well" and self.exists:
            return True
        await self.time.sleep(timeout_s)
        return False

    async def load(self):
        if self.mode == "hung" or not self.exists:
            await self.time.sleep(60)
            raise TransportError("no answer")
        tokens = int(self.time.monotonic()) if self.mode == "busy" else 7
        return EngineLoad(running=1, waiting=0, token_usage=0.5, generated_tokens=tokens)

    async def close(self):
        self.is_closed = True


class Runner:
    """Owns one slot; ``failures`` of the next starts fail."""

    def __init__(self, house, slot):
        self.house = house
        self.slot = slot
        self.count = 0
        self.failures = 0
        self.server = None
        self.started_at = []

    async def start(self):
        self.started_at.append(self.house.time.monotonic())
        await self.house.time.sleep(2)
        if self.failures:
            self.failures -= 1
            raise EngineDead("exit code 1 while starting")
        self.count += 1
        self.server = Server(self.house.time, self.slot, f"{self.slot}-{self.count}")
        self.house.servers[self.server.address.incarnation] = self.server
        return self.server.address

    async def stop(self):
        await self.house.time.sleep(0.5)
        if self.server is not None:
            self.server.exists = False

    async def is_running(self):
        return self.server is not None and self.server.exists


class House:
    """A pool of engines under a monitor, in virtual time."""

    def __init__(self, engines=2, **settings):
        self.time = VirtualTime()
        self.servers = {}
        self.pool = EnginePool(engines, clock=self.time)
        self.runners = {slot: Runner(self, slot) for slot in range(engines)}
        self.monitor = HealthMonitor(
            self.pool,
            self.runners,
            HealthSettings(**settings),
            connect=lambda address: self.servers[address.incarnation],
            clock=self.time,
            sleep=self.time.sleep,
        )
        self.events = []
        self.pool.listen(lambda event, fields: self.events.append((event, fields["slot"])))

    async def up(self, tasks):
        async with anyio.create_task_group() as starting:
            starting.start_soon(self.monitor.start_engines)
            await self.time.run_for(3)
        self.publish(0)
        await tasks.start(self.monitor.run)
        # The first probes have been made and the next are 10 s away.
        await self.time.run_for(1)

    def publish(self, update):
        policy = PolicyId(1, update)
        for engine in self.pool.live():
            self.pool.mark_verified(engine.slot, engine.incarnation, policy)
        self.pool.serve(policy)

    def state(self, slot=0):
        return self.pool.state(slot)

    def server(self, slot=0):
        return self.runners[slot].server


@pytest.fixture
async def tasks():
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


async def test_engines_start_at_the_same_time_and_are_stale_until_published(tasks):
    house = House(engines=3)
    async with anyio.create_task_group() as starting:
        starting.start_soon(house.monitor.start_engines)
        await house.time.run_for(2.5)
    assert [house.state(slot) for slot in range(3)] == [SlotState.STALE] * 3
    assert not house.pool.is_available


async def test_a_start_that_fails_is_raised_after_the_others_have_come_up(tasks):
    house = House()
    house.runners[1].failures = 1
    raised = []

    async def start():
        try:
            await house.monitor.start_engines()
        except EngineDead as error:
            raised.append(error)

    tasks.start_soon(start)
    await house.time.run_for(3)
    assert len(raised) == 1
    assert [house.state(0), house.state(1)] == [SlotState.STALE, SlotState.DEAD]


@pytest.mark.parametrize(
    ("settings", "limit_s"),
    [
        ({}, 35),
        ({"interval_s": 30.0}, 95),
        ({"interval_s": 30.0, "timeout_s": 30.0}, 95),
        ({"misses": 5}, 55),
        ({"misses": 1, "timeout_s": 4.0}, 15),
        # No room for the promise: one probe alone may take longer.
        ({"interval_s": 1.0, "timeout_s": 10.0}, 1 + 10 + 2 + 2),
    ],
)
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.9])
async def test_a_hung_engine_is_dead_in_the_promised_time_whenever_it_hangs(
    tasks, settings, limit_s, phase
):
    house = House(**settings)
    await house.up(tasks)
    made = HealthSettings(**settings)
    await house.time.run_for(3 * made.interval_s + phase * made.interval_s)
    house.server().mode = "hung"
    hung_at = house.time.monotonic()
    probes = len(house.server().probes)
    while (Event.ENGINE_DIED, 0) not in house.events:
        await house.time.run_for(0.25)
    assert house.time.monotonic() - hung_at <= limit_s
    assert len(house.server().probes) - probes == made.misses, "each with its whole limit"
    await house.time.run_for(1)  # its process is ended, whoever is cancelled meanwhile
    assert not house.servers["0-1"].exists
    assert house.state(1) is SlotState.HEALTHY


async def test_the_first_miss_makes_it_suspect(tasks):
    house = House()
    await house.up(tasks)
    house.server().mode = "hung"
    await house.time.run_for(21)
    assert house.state() is SlotState.SUSPECT


async def test_an_exit_between_two_probes_of_a_round_is_seen_at_once(tasks):
    house = House()
    await house.up(tasks)
    house.server().mode = "hung"
    await house.time.run_for(15)
    house.server().exists = False
    await house.time.run_for(1.1)
    assert (Event.ENGINE_DIED, 0) in house.events
    await house.time.run_for(5)
    assert house.state() is SlotState.STALE


async def test_hung_engines_are_probed_at_the_same_time(tasks):
    house = House(engines=4)
    await house.up(tasks)
    for slot in range(4):
        house.server(slot).mode = "hung"
    await house.time.run_for(42)
    died = [slot for event, slot in house.events if event is Event.ENGINE_DIED]
    assert sorted(died) == [0, 1, 2, 3], "one after another would take four times as long"


async def test_a_missed_probe_is_forgiven_by_the_next_answer(tasks):
    house = House()
    await house.up(tasks)
    house.server().mode = "hung"
    await house.time.run_for(21)
    assert house.state() is SlotState.SUSPECT
    house.server().mode = "well"
    await house.time.run_for(20)
    assert house.state() is SlotState.HEALTHY
    house.server().mode = "hung"
    await house.time.run_for(20)
    assert house.state() is SlotState.SUSPECT, "misses are counted anew"


async def test_tokens_made_for_others_count_as_life_while_a_probe_waits(tasks):
    house = House()
    await house.up(tasks)
    house.server().mode = "busy"
    await house.time.run_for(120)
    assert house.state() is SlotState.HEALTHY
    house.server().mode = "stuck"  # answers about its load, makes no token
    await house.time.run_for(45)
    assert house.state() is not SlotState.HEALTHY


async def test_an_exited_server_is_dead_at_once_and_its_slot_restarted_as_stale(tasks):
    house = House()
    await house.up(tasks)
    house.server().exists = False
    await house.time.run_for(1.1)
    assert house.state() in (SlotState.DEAD, SlotState.RESTARTING)
    await house.time.run_for(5)
    assert house.state() is SlotState.STALE
    assert house.server().address.incarnation == "0-2"
    assert house.pool.choose().slot == 1, "it joins only through a publication"
    house.publish(1)
    assert house.state() is SlotState.HEALTHY
    assert (Event.ENGINE_RESTARTED, 0) in house.events


async def test_the_old_server_has_ended_before_the_new_one_starts(tasks):
    house = House()
    await house.up(tasks)
    old = house.server()
    old.mode = "hung"
    await house.time.run_for(50)
    assert not old.exists
    assert old.is_closed
    assert house.server() is not old


async def test_three_restarts_an_hour_with_back_off_then_the_slot_stays_dead(tasks):
    house = House(backoff_s=5.0)
    await house.up(tasks)
    house.runners[0].failures = 100
    house.server().exists = False
    while len(house.runners[0].started_at) < 4:
        assert house.monitor.lost_slots == [], "a restart is still to come"
        await house.time.run_for(1)
    await house.time.run_for(300)
    starts = house.runners[0].started_at[1:]
    assert len(starts) == 3
    gaps = [round(b - a) for a, b in itertools.pairwise(starts)]
    assert 5 <= gaps[0] - 2 <= 7
    assert 10 <= gaps[1] - 2 <= 12
    assert house.monitor.lost_slots == [0]
    house.runners[0].failures = 0
    await house.time.run_for(3600)
    assert house.state() is SlotState.STALE, "the hour has passed"
    assert house.monitor.lost_slots == []


async def test_a_person_gives_a_slot_its_restarts_back(tasks):
    house = House(backoff_s=5.0)
    await house.up(tasks)
    house.runners[0].failures = 100
    house.server().exists = False
    await house.time.run_for(300)
    assert house.monitor.lost_slots == [0]
    house.runners[0].failures = 0
    house.monitor.renew()
    assert house.monitor.lost_slots == []
    await house.time.run_for(5)
    assert house.state() is SlotState.STALE


async def test_first_wait_comes_after_the_start_and_after_every_resume(tasks):
    house = House(first_wait_s=100.0)
    await house.up(tasks)
    house.server().mode = "hung"
    await house.time.run_for(98)
    assert house.server().probes == []
    await house.time.run_for(5)
    assert len(house.server().probes) == 1
    house.monitor.pause()
    house.monitor.resume()
    await house.time.run_for(95)
    assert len(house.server().probes) == 1
    assert house.state() is SlotState.HEALTHY, "the miss before the pause says nothing"


async def test_nothing_is_judged_while_it_is_paused(tasks):
    house = House()
    await house.up(tasks)
    house.monitor.pause()
    house.monitor.pause()
    house.server().mode = "hung"
    await house.time.run_for(120)
    house.monitor.resume()
    await house.time.run_for(120)
    assert (house.state(), house.monitor.is_paused(0)) == (SlotState.HEALTHY, True)
    house.monitor.resume()
    await house.time.run_for(45)
    assert house.state() is not SlotState.HEALTHY


async def test_a_probe_under_way_when_it_is_paused_counts_for_nothing(tasks):
    house = House(misses=1)
    await house.up(tasks)
    house.server().mode = "hung"
    await house.time.run_for(12)
    house.monitor.pause()
    await house.time.run_for(30)
    house.server().mode = "well"
    house.monitor.resume()
    await house.time.run_for(30)
    assert house.state() is SlotState.HEALTHY


async def test_a_publication_can_kill_what_it_could_not_verify(tasks):
    house = House()
    await house.up(tasks)
    server = house.server()
    killed = []

    async def kill(incarnation):
        killed.append(await house.monitor.kill(0, incarnation, "checksum differs"))

    tasks.start_soon(kill, "0-1")
    await house.time.run_for(0.6)
    assert killed == [True]
    assert not server.exists, "gone on return, so nothing half-loaded can serve"
    await kill("0-1")
    assert killed == [True, False]
    await house.time.run_for(10)
    assert house.state() is SlotState.STALE


async def test_who_kills_what_is_being_ended_waits_until_it_is_gone(tasks):
    """The monitor was faster: nothing may resume beside an engine that still stands."""
    house = House()
    await house.up(tasks)
    server, seen = house.server(), []

    async def kill(reason):
        seen.append((await house.monitor.kill(0, "0-1", reason), server.exists))

    tasks.start_soon(kill, "3 of 3 probes missed in a row")
    tasks.start_soon(kill, "not verified")
    await house.time.run_for(0.4)
    assert seen == []
    await house.time.run_for(0.2)
    assert sorted(seen) == [(False, False), (True, False)]


async def test_a_failed_publication_finds_out_who_answers_nothing(tasks):
    """It had paused the monitor; its retry must not meet the hung one again."""
    house = House(engines=4)
    await house.up(tasks)
    house.monitor.pause()
    house.server(0).mode = "hung"
    house.server(1).exists = False
    house.server(2).mode = "stuck"  # it does no work, but it answers: probes will find it
    lost = []

    async def bury():
        lost.extend(await house.monitor.bury_lost())

    tasks.start_soon(bury)
    await house.time.run_for(5)
    assert lost == [0, 1]
    assert not house.servers["0-1"].exists
    assert [house.pool.state(slot) for slot in (2, 3)] == [SlotState.HEALTHY] * 2
    await house.time.run_for(10)
    assert [house.pool.state(slot) for slot in (0, 1)] == [SlotState.STALE] * 2, "also in a pause"


async def test_without_recovery_a_silent_engine_is_left_alone(tasks):
    """Somebody may be looking at it with a debugger."""
    house = House(enabled=False)
    await house.up(tasks)
    house.server().mode = "hung"
    tasks.start_soon(house.monitor.bury_lost)
    await house.time.run_for(10)
    assert house.state() is SlotState.HEALTHY


async def test_switched_off_it_neither_probes_nor_recovers(tasks):
    house = House(enabled=False)
    await house.up(tasks)
    house.server().exists = False
    await house.time.run_for(60)
    assert house.state() is SlotState.HEALTHY
    assert house.server(1).probes == []
    tasks.start_soon(house.monitor.kill, 0, "0-1", "not verified")
    await house.time.run_for(60)
    assert house.state() is SlotState.DEAD
    assert house.monitor.lost_slots == [0]


async def test_stopping_ends_every_server_and_closes_every_client(tasks):
    house = House()
    await house.up(tasks)
    servers = [house.server(slot) for slot in range(2)]
    tasks.start_soon(house.monitor.stop)
    await house.time.run_for(2)
    assert all(not s.exists and s.is_closed for s in servers)
    assert [house.state(slot) for slot in range(2)] == [SlotState.RETIRED] * 2
