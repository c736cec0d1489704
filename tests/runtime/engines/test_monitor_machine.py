"""The monitor against what may be asked of it, whatever engines and publications do and when."""

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.engines.health import DETECT_SLACK_S, EXIT_POLL_S, HealthSettings
from runtime.engines.slots import LIVE, SlotState
from runtime.telemetry.events import Event
from tests.runtime.engines.test_monitor import House

SLOTS = 2
SETTINGS = HealthSettings(first_wait_s=2.0)
DETECT_S = SETTINGS.interval_s * SETTINGS.misses + DETECT_SLACK_S
TOLERATED_S = 2 * SETTINGS.interval_s
"""A single hang that is shorter ends before the last probe of any round is missed."""
STOP_S = 0.5
"""A server of the house takes so long to end."""


class Model:
    """What is true of one incarnation: how long it has been unwell, and who ended it."""

    def __init__(self, born_s):
        self.bad_since = None
        self.last_bad = -1e9
        self.bad_times = []
        """When it became unwell, each time."""
        self.watched_since = born_s
        """Since then the monitor has looked at it without a pause."""
        self.gone_since = None
        self.was_busy = False
        """Once it was: a probe may have begun, unanswered, while its tokens still told of life."""
        self.condemned = False


class MonitorMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.house = House(engines=SLOTS, first_wait_s=SETTINGS.first_wait_s)
        self.models = {}
        self.pauses = Counter()
        """By slot; None: of all."""
        self.update = 0
        self.problems = []
        self.house.pool.listen(self.heard)
        self.runner.run(self.begin())

    async def begin(self):
        self.starting = asyncio.create_task(self.house.monitor.start_engines())
        await self.house.time.run_for(3)
        self.watching = asyncio.create_task(self.house.monitor.run())
        await self.house.time.run_for(0)

    @property
    def now(self):
        return self.house.time.monotonic()

    def model(self, server):
        name = server.address.incarnation
        return self.models.setdefault(name, Model(self.now))

    def heard(self, event, fields):
        """The moment an engine is declared dead: was there a reason?"""
        if event is not Event.ENGINE_DIED:
            return
        model = self.models.get(fields["incarnation"])
        if model is None:
            return self.problems.append(f"{fields} died before it was seen")
        if model.condemned or model.gone_since is not None:
            return None
        if self.is_paused(fields["slot"]):
            self.problems.append(f"{fields} was judged in a pause")
        if model.bad_since is None and self.now - model.last_bad > DETECT_S:
            self.problems.append(f"{fields} was well")
        if model.bad_since is not None and self.is_late(model, model.bad_since, DETECT_S):
            self.problems.append(f"{fields} was found late")
        recent = [t for t in model.bad_times if self.now - t <= DETECT_S]
        is_single = len(recent) == len(model.bad_times) == 1 and not model.was_busy
        if is_single and self.now - recent[0] < TOLERATED_S:
            self.problems.append(f"{fields} was given up after {self.now - recent[0]} s")
        return None

    def is_paused(self, slot):
        return self.pauses[None] + self.pauses[slot] > 0

    slot = st.integers(0, SLOTS - 1)
    one_or_all = st.sampled_from([None, *range(SLOTS)])

    def server(self, slot):
        server = self.house.server(slot)
        return server if server is not None and server.exists else None

    # --- The world ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0, 10.0, 34.0]))
    def time_passes(self, seconds):
        self.runner.run(self.house.time.run_for(seconds))
        for slot in range(SLOTS):
            if (server := self.server(slot)) is not None:
                self.model(server)

    @rule(slot=slot, mode=st.sampled_from(["hung", "stuck"]), seconds=st.integers(0, 45))
    def hang_for(self, slot, mode, seconds):
        """At any phase of a round, for any time; it may get well again or not."""
        self.time_passes(seconds / 5)
        self.behave(slot, mode)
        self.time_passes(seconds)
        self.the_dead_are_found_in_time()

    @rule(slot=slot, mode=st.sampled_from(["hung", "stuck", "busy", "well"]))
    def behave(self, slot, mode):
        if (server := self.server(slot)) is None:
            return
        model = self.model(server)
        server.mode = mode
        model.was_busy |= mode == "busy"
        # One that makes tokens for others is well, though it answers no probe.
        if mode in ("hung", "stuck"):
            if model.bad_since is None:
                model.bad_since = self.now
                model.bad_times.append(self.now)
        elif model.bad_since is not None:
            model.bad_since, model.last_bad = None, self.now

    @rule(slot=slot)
    def exit(self, slot):
        if (server := self.server(slot)) is not None:
            self.model(server).gone_since = self.now
            server.exists = False

    # --- Publications ---------------------------------------------------------------------------

    @rule(which=one_or_all)
    @precondition(lambda self: self.pauses.total() < 3)
    def pause(self, which):
        async def pause():
            self.house.monitor.pause(which)

        self.pauses[which] += 1
        self.runner.run(pause())

    @rule(data=st.data(), seconds=st.integers(0, 15))
    @precondition(lambda self: self.pauses.total())
    def resume(self, data, seconds):
        which = data.draw(st.sampled_from(list(self.pauses.elements())), label="which")
        self.time_passes(seconds)
        self.pauses[which] -= 1
        self.house.monitor.resume(which)
        for slot in range(SLOTS) if which is None else [which]:
            if (server := self.house.server(slot)) is not None:
                self.model(server).watched_since = self.now

    @rule()
    def publish(self):
        self.update += 1
        self.house.publish(self.update)

    @rule(slot=slot)
    def kill_what_was_not_verified(self, slot):
        server = self.server(slot)
        if server is None or self.house.state(slot) not in LIVE:
            return
        self.model(server).condemned = True

        async def kill():
            name = server.address.incarnation
            killing = asyncio.create_task(self.house.monitor.kill(slot, name, "not verified"))
            await self.house.time.run_for(STOP_S + 0.1)
            assert killing.done()

        self.runner.run(kill())
        assert not server.exists, "gone on return"

    # --- What always holds ----------------------------------------------------------------------

    @invariant()
    def nobody_dies_without_a_reason(self):
        assert not self.problems

    @invariant()
    def the_dead_are_found_in_time(self):
        for view in self.house.pool.views():
            model = self.models.get(view.incarnation)
            if model is None or self.is_paused(view.slot) or view.state not in LIVE:
                continue
            if model.gone_since is not None:
                assert not self.is_late(model, model.gone_since, EXIT_POLL_S + 0.1)
            if model.bad_since is not None:
                assert not self.is_late(model, model.bad_since, DETECT_S)

    def is_late(self, model, since, limit_s):
        """More than ``limit_s`` have passed in which the monitor could have found it out."""
        return self.now - max(since, model.watched_since + SETTINGS.first_wait_s) > limit_s

    @invariant()
    def restarts_are_bounded_and_one_server_a_slot_exists(self):
        for slot, runner in self.house.runners.items():
            recent = [t for t in runner.started_at[1:] if t > self.now - 3600]
            assert len(recent) <= SETTINGS.restarts_per_hour
            there = [s for s in self.house.servers.values() if s.slot == slot and s.exists]
            assert len(there) <= 1
            assert all(s is runner.server for s in there)

    @invariant()
    def traffic_goes_to_verified_engines_alone(self):
        for view in self.house.pool.views():
            if view.state in (SlotState.HEALTHY, SlotState.SUSPECT):
                assert view.policy is not None
            if view.state is SlotState.STALE:
                assert view.policy is None

    def teardown(self):
        async def end():
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            # What ends a server cannot be cancelled; it is given its time.
            for _ in range(4):
                await self.house.time.run_for(1)
            await asyncio.gather(*tasks, return_exceptions=True)

        self.runner.run(end())
        self.runner.close()


TestMonitorMachine = MonitorMachine.TestCase
TestMonitorMachine.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
