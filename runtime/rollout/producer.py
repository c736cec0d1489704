"""The producer: keeps whole groups in flight and hands finished ones to the trainer.

One task of the session (``run``, in a task group the caller owns) admits prompts from the ledger
while there are sample slots for a whole group and room under the staleness bound; room is made by
publication. Every group is a task of its own with one owner, one deadline and one settlement.
Whatever ends ``run`` is a clean stop (``close``, or cancellation from outside) or the session's
fatal error.

Settling a group and making a collection are plain functions: between looking and acting nothing
awaits, so no cancellation can fall in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import anyio
from anyio.abc import TaskGroup, TaskStatus

from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.data.ledger import STALE, GroupKey
from runtime.data.samples import Collection, Group
from runtime.errors import ContractViolation, ServingStopped, SessionError
from runtime.policy import PolicyId
from runtime.rollout.calls import GenerationCalls
from runtime.rollout.errors_log import ErrorsLog
from runtime.rollout.flight import Flight, make_group
from runtime.rollout.gate import Sleep
from runtime.rollout.occupancy import of_buffer, of_calls, of_gate, of_pool
from runtime.rollout.parts import ProducerParts
from runtime.rollout.requests import most_telling
from runtime.rollout.settings import ProducerSettings
from runtime.rollout.settlement import Settlement
from runtime.rollout.signal import Signal
from runtime.rollout.slots import SampleSlots
from runtime.rollout.stock import Stock
from runtime.rollout.stop_rule import StopRule
from runtime.rollout.waiting import TakeWait, TakeWatch
from runtime.rollout.watched import is_cancelled, watched
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

TICK_S = 0.2
"""How often time is looked at: deadlines, hold-off, stop rule, series."""

_log = get_logger()


class Producer:
    """Keeps groups in flight, buffers finished ones, gives out collections.

    Args:
        settings: what the run file settled.
        parts: ledger, engines, gate, function, judge.
        next_collection: id of the first collection it gives out.
        rule: the stop rule for serving errors.
        errors: series and rows of ``errors/*``, recording in ``rule``; by default only counted.
        clock: for deadlines and hold-off.
        sleep: waits on that clock.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        parts: ProducerParts,
        *,
        next_collection: int = 1,
        rule: StopRule | None = None,
        errors: ErrorsLog | None = None,
        clock: Clock | None = None,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._ledger = parts.ledger
        self._clock: Clock = clock or SystemClock()
        self._sleep = sleep
        self._rule = rule or StopRule(self._clock)
        self._errors = errors or ErrorsLog(
            rule=self._rule, requeued=lambda: parts.ledger.counts().requeued, clock=self._clock
        )
        self._admission = Signal()
        self._news = Signal()
        self._slots = SampleSlots(settings.max_concurrent_samples, on_free=self._admission.notify)
        self._calls = GenerationCalls(
            pool=parts.pool,
            gate=parts.gate,
            slots=self._slots,
            settings=settings,
            cut=lambda flight: flight.cancel("drain"),
        )
        self._stock = Stock(settings, parts.ledger, next_collection=next_collection)
        self._settlement = Settlement(
            settings,
            ledger=parts.ledger,
            budget=parts.budget,
            accept=parts.accept,
            errors=self._errors,
            buffer=self._stock.buffer,
            clock=self._clock,
        )
        self._flights: dict[GroupKey, Flight] = {}
        self._policy: PolicyId | None = None
        self._num_admitted = 0
        self._is_dry = False
        self._progress_at = self._clock.monotonic()
        self._scope = anyio.CancelScope()
        self._tasks: TaskGroup | None = None
        self._is_closing = False
        self._fatal: Exception | None = None
        self._over = anyio.Event()
        parts.gate.listen(lambda _event, _fields: self._admission.notify())
        parts.pool.listen(lambda _event, _fields: self._admission.notify())

    # --- Life -------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Produce until closed. Once per object; start it with ``await tasks.start(producer.run)``.

        Raises:
            RunError: whatever made going on impossible; also raised by a ``take`` under way.
        """
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(watched, self._tick_for_ever, self._fail)
                    tasks.start_soon(watched, self._admit_for_ever, self._fail)
                    task_status.started()
        finally:
            self._tasks = None
            self._end()
        if self._fatal is not None:
            raise self._fatal

    async def close(self) -> None:
        """Stop producing: cancel and join what is in flight or waits, and requeue it. Idempotent.

        Finished groups stay pending in the ledger. Does nothing if ``run`` was never started.
        """
        self._is_closing = True
        if faults.plan is not None:
            await faults.plan.pause("producer.close")
        self._scope.cancel()
        if self._tasks is not None:
            await self._over.wait()

    def _end(self) -> None:
        if not self._is_closing and self._fatal is None and not is_cancelled():
            self._fatal = SessionError("the producer ended although nobody had stopped it")
        self._errors.close(self._fatal)
        self._over.set()
        self._news.notify()

    def _fail(self, error: Exception) -> None:
        if self._fatal is None:
            self._fatal = error
        self._scope.cancel()
        self._news.notify()

    # --- The trainer's side -----------------------------------------------------------------

    async def take(
        self,
        num_groups: int,
        trainer_policy: PolicyId,
        *,
        no_progress_s: float = math.inf,
        on_wait: Callable[[TakeWait], None] | None = None,
    ) -> Collection | None:
        """Wait for the next collection, oldest groups first, none staler than allowed.

        Taking is not consuming: the session marks consumption in the ledger and says so by
        ``consumed``. Within a collection, groups stand in the order of their prompts.

        Args:
            num_groups: groups of a collection; fewer come when the data ends.
            trainer_policy: the trainer's policy now; staleness is counted from its update.
            no_progress_s: longest time without anything happening to any group, gate open.
            on_wait: told every 30 s how the wait stands.

        Returns:
            None at the end of the data: nothing is remaining, in flight or finished.

        Raises:
            WaitTimeout: nothing happened for ``no_progress_s``.
            RunError: the producer's fatal error.
            SessionError: if the producer was closed or never ran.
        """
        watch = TakeWatch(self._clock, no_progress_s, on_wait)
        while True:
            if faults.plan is not None:
                await faults.plan.pause("producer.take")
            self._check_running()
            found = self._try_take(num_groups, trainer_policy)
            if found is not None:
                return found
            if self._is_at_end and not len(self._stock.buffer):
                return None
            if not self._parts.gate.is_open:
                self._progress_at = self._clock.monotonic()
            watch.look(
                progress_at=self._progress_at,
                in_flight=len(self._flights),
                finished=len(self._stock.buffer),
                wanted=num_groups,
            )
            await self._news.wait()

    def consumed(self, groups: Iterable[Group]) -> None:
        """The ledger has these as consumed; the next publication makes room for as many.

        Raises:
            ContractViolation: if one of them was not taken from here.
        """
        self._stock.consumed(groups)

    def published(self, policy: PolicyId) -> None:
        """``policy`` is published and verified: it makes room, and ages what is left.

        Call it after ``pool.serve``; the first call starts admission.

        Raises:
            ContractViolation: on a policy of another epoch, or one older than the last.
        """
        if policy.epoch != self._settings.epoch or (self._policy and policy < self._policy):
            raise ContractViolation(
                f"the producer of epoch {self._settings.epoch} at {self._policy} was told that "
                f"{policy} is published"
            )
        self._policy = policy
        self._stock.published()
        self._send_back_older_than(policy.update - self._settings.max_staleness)
        self._calls.published()
        self._progress()

    def _try_take(self, num_groups: int, trainer: PolicyId) -> Collection | None:
        self._send_back_older_than(trainer.update - self._settings.max_staleness)
        collection = self._stock.take(
            num_groups,
            trainer,
            awaited=[
                flight.oldest.update
                for flight in self._flights.values()
                if flight.num_stale and flight.oldest is not None and flight.is_wanted
            ],
            is_last=self._is_at_end,
        )
        if collection is not None:
            # What the next publication makes too old can never be used: it is ended here, so that
            # the engines do not work on it until then.
            upcoming = trainer.update + self._settings.updates_per_collection
            self._send_back_older_than(upcoming - self._settings.max_staleness)
            self._progress()
        return collection

    @property
    def _is_at_end(self) -> bool:
        """Nothing is remaining, queued or in flight; what is finished is all there will be."""
        return self._is_dry and not self._flights

    def _send_back_older_than(self, update: int) -> None:
        if self._stock.send_back_older_than(update):
            self._progress()
        for flight in self._flights.values():
            if flight.oldest is not None and flight.oldest.update < update:
                flight.cancel(STALE)

    def _check_running(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._tasks is None or self._is_closing:
            raise SessionError("a collection was asked of a producer that does not run")

    # --- Admitting --------------------------------------------------------------------------

    async def _admit_for_ever(self) -> None:
        while True:
            while self._may_admit() and self._launch():
                pass
            if faults.plan is not None:
                await faults.plan.pause("producer.admit")
            await self._admission.wait()

    def _may_admit(self) -> bool:
        return (
            self._policy is not None
            and self._parts.gate.is_open
            and not self._settlement.is_holding_off
            and self._num_outstanding < self._settings.max_admitted_groups
            and not self._stock.buffer.num_waiting_for_room
            and self._slots.fits(self._settings.samples_per_prompt)
            # Without an engine one group at a time goes out, to fail as `unavailable`.
            and (self._parts.pool.is_available or not self._flights)
        )

    @property
    def _num_outstanding(self) -> int:
        """Groups admitted and not yet consumed, those in training included."""
        return len(self._flights) + self._stock.num_holding_room

    def _launch(self) -> bool:
        admission = self._ledger.admit()
        if admission is None:
            if not self._is_dry:
                self._is_dry = True
                self._news.notify()
            return False
        count = self._settings.samples_per_prompt
        flight = Flight(
            prompt=self._parts.prompt(admission.prompt_id),
            attempt=admission.attempt,
            num_stale=admission.num_stale,
            order=self._num_admitted,
            reserved=count,
            admitted_s=self._parts.gate.open_seconds(),
        )
        self._num_admitted += 1
        self._slots.take_now(count)
        self._flights[flight.key] = flight
        assert self._tasks is not None
        self._tasks.start_soon(
            watched, partial(self._fly, flight), self._fail, name=f"group {flight.prompt.id}"
        )
        return True

    async def _fly(self, flight: Flight) -> None:
        group: Group | None = None
        error: Exception | None = None
        try:
            with flight.scope:
                if faults.plan is not None:
                    await faults.plan.pause("producer.group")
                group = await make_group(
                    flight,
                    partial(self._calls.complete, flight),
                    function=self._parts.function,
                    judge=self._parts.judge,
                    teacher=self._parts.teacher,
                    shape=self._parts.shape,
                    settings=self._settings,
                    on_generated=self._errors.succeeded,
                )
        except Exception as raised:
            error = most_telling([raised])
        finally:
            # Also on the way down of the whole producer: the group is cancelled then.
            self._land(flight, group, error)

    def _land(self, flight: Flight, group: Group | None, error: Exception | None) -> None:
        del self._flights[flight.key]
        self._slots.give(flight.reserved)
        fatal = self._settlement.settle(flight, group, error)
        if faults.plan is not None and faults.plan.reach("producer.land") is faults.Kind.DUPLICATE:
            fatal = self._settlement.settle(flight, group, error) or fatal
        self._progress()
        if fatal is not None:
            self._fail(fatal)
        self._check_stop_rule()

    def _progress(self) -> None:
        self._progress_at = self._clock.monotonic()
        self._is_dry = False  # asked again at the next admission
        self._admission.notify()
        self._news.notify()

    # --- Time -------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            if faults.plan is not None:
                await faults.plan.pause("producer.tick")
            await self._sleep(TICK_S)
            open_s = self._parts.gate.open_seconds()
            for flight in self._flights.values():
                flight.check_deadline(open_s, self._settings)
            self._check_stop_rule()
            self._errors.tick()
            self._admission.notify()
            self._news.notify()

    def _check_stop_rule(self) -> None:
        reading = self._rule.read()
        if reading.is_fatal and self._fatal is None:
            _log.error(Event.ROLLOUT_STOPPED, **self._errors.values())
            self._fail(
                ServingStopped(
                    f"{reading.window_failed} of {reading.window_attempts} group attempts of the "
                    f"last 5 minutes failed, and at least half for {reading.high_s:.0f} s on end",
                    **self._errors.values(),
                )
            )

    @property
    def progress_at(self) -> float:
        """When anything last happened to any group, on this process's monotonic clock."""
        return self._progress_at

    # --- Looking ----------------------------------------------------------------------------

    def occupancy(self) -> dict[str, float | str | None]:
        """One row of ``pipeline_occupancy.jsonl``."""
        return {
            "policy": None if self._policy is None else str(self._policy),
            "groups_in_flight": len(self._flights),
            "groups_outstanding": self._num_outstanding,
            "max_outstanding_groups": self._settings.max_admitted_groups,
            "groups_in_training": self._stock.num_in_training,
            "groups_filtered": self._settlement.filter.rejected.total(),
            "admission_held_off": float(self._settlement.is_holding_off),
            **of_gate(self._parts.gate),
            **of_calls(self._calls, self._slots),
            **of_buffer(self._stock.buffer),
            **of_pool(self._parts.pool),
            **self._errors.values(),
        }
