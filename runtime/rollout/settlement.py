"""What becomes of a group's attempt once everything in it has been joined."""

from __future__ import annotations

import math

from runtime.clock import Clock
from runtime.data.ledger import Ledger
from runtime.data.samples import Group
from runtime.errors import DataError, ServingError
from runtime.rollout.buffer import Buffer, FinishedGroup
from runtime.rollout.errors_log import ErrorsLog, describe
from runtime.rollout.filters import FilterRounds, GroupFilter
from runtime.rollout.flight import Flight
from runtime.rollout.parts import DataBudget
from runtime.rollout.settings import ProducerSettings
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

_log = get_logger()


class Settlement:
    """Tells ledger, filter, budget, buffer and error record. Sync: it happens whole.

    ============================  ==========================================================
    outcome                       the prompt
    ============================  ==========================================================
    samples with rewards          into the buffer, or ended as filtered
    serving error, deadline       back in the queue; the failure counts; admissions hold off
    data error                    charged to the budget and ended as skipped
    cancelled by us               back in the queue; no failure
    anything else                 back in the queue; the error is fatal
    ============================  ==========================================================

    Args:
        settings: deadlines, hold-off, rounds of filters.
        ledger: the states of prompts. It ignores late attempts, and so does this.
        budget: for data errors.
        accept: filter on judged groups, or None.
        errors: counts attempts.
        buffer: where finished groups go.
        clock: for the hold-off.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        *,
        ledger: Ledger,
        budget: DataBudget,
        accept: GroupFilter | None,
        errors: ErrorsLog,
        buffer: Buffer,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._budget = budget
        self._accept = accept
        self._errors = errors
        self._buffer = buffer
        self._clock = clock
        self._held_until = -math.inf
        self.filter = FilterRounds(
            groups_per_collection=settings.groups_per_collection,
            max_rounds=settings.filter_max_rounds,
        )

    @property
    def is_holding_off(self) -> bool:
        """A serving error is too recent for new submissions."""
        return self._clock.monotonic() < self._held_until

    def settle(
        self, flight: Flight, group: Group | None, error: Exception | None
    ) -> Exception | None:
        """Settle one attempt; returns the error that ends the run, if this is one.

        Args:
            flight: the attempt; its ``reason`` and ``failure`` say whether we ended it.
            group: its samples with rewards, or None.
            error: what it ended with; None with ``group`` None means it was cancelled.
        """
        if flight.under_way:
            # Nothing above lets this happen but a defect, or a rollout function that leaves tasks
            # behind: a later attempt would run beside them.
            _log.error(
                Event.GROUP_UNJOINED,
                prompt=str(flight.prompt.id),
                attempt=flight.attempt,
                requests=flight.under_way,
            )
        try:
            self._settle(flight, group, error)
        except Exception as fatal:
            self._ledger.requeue(*flight.key, "fatal")
            return fatal
        return None

    def _settle(self, flight: Flight, group: Group | None, error: Exception | None) -> None:
        if error is not None and not isinstance(error, ServingError | DataError):
            raise error
        if flight.failure is not None:
            # Also when an answer came together with the verdict.
            self._failed(flight, flight.failure)
        elif flight.reason is not None or (group is None and error is None):
            self._ledger.requeue(*flight.key, flight.reason or "shutdown")
        elif isinstance(error, ServingError):
            self._failed(flight, error)
        elif isinstance(error, DataError):
            self._budget.charge(flight.prompt, error)
            self._ledger.skip(*flight.key)
            _log.warning(Event.GROUP_SKIPPED, prompt=str(flight.prompt.id), **describe(error))
        elif group is not None:
            self._finished(flight, group)

    def _finished(self, flight: Flight, group: Group) -> None:
        if self.filter.judge(group, self._accept) is not None:
            self._ledger.filter(*flight.key)
        elif self._ledger.finish(*flight.key):
            self._buffer.add(
                FinishedGroup(group=group, order=flight.order, num_stale=flight.num_stale)
            )

    def _failed(self, flight: Flight, error: ServingError) -> None:
        prompt = str(flight.prompt.id)
        self._ledger.requeue(*flight.key, error.kind)
        self._held_until = self._clock.monotonic() + self._settings.hold_off_s
        self._errors.failed(error, prompt=prompt, attempt=flight.attempt)
        _log.info(
            Event.GROUP_REQUEUED,
            prompt=prompt,
            attempt=flight.attempt,
            reason=error.kind,
            **describe(error),
        )
