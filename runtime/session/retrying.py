"""How a step of the session is tried again, held, and let go.

A failure the session can mend (``RetryBy.SESSION``) is retried with doubling pauses; then the step
is *held*: everything stays in memory and the workflow view shows the failure's id. A file
``control/retry-<id>`` starts one more try. Held for longer than ``detach_grace`` the run is parked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio

from runtime.clock import Clock
from runtime.errors import RetryBy, RunError
from runtime.rundir.failure import Failure
from runtime.session.ends import End, EndedBy

T = TypeVar("T")


class StepEnded(Exception):
    """A held step was let go; the session goes to its end with this reason."""

    def __init__(self, end: End, failure: Failure) -> None:
        super().__init__(f"held step let go: {end.by}")
        self.end = end
        self.failure = failure


class HoldSignals(Protocol):
    """What a held step listens to."""

    def retry_requested(self, failure_id: str) -> bool:
        """A person asked for one more try of this failure. Consumes the request."""
        ...

    def end_requested(self) -> End | None:
        """A stop was asked for, by file or signal."""
        ...


class HoldView(Protocol):
    """Where a held step is shown."""

    def failed(self, failure: Failure, *, attempt: int, held: bool) -> None:
        """A try failed; ``held`` when nothing happens until a person acts."""
        ...

    def recovered(self, failure: Failure) -> None:
        """The step went through after all."""
        ...


class HoldEffects(Protocol):
    """What a held step does to the rest of the session."""

    def begin(self) -> None:
        """A step is held; again for each try that failed."""
        ...

    def asked(self) -> None:
        """A person asked for one more try, which begins now."""
        ...

    def end(self) -> None:
        """The held step went through."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRetries:
    """Runs one step at a time under the session's retry rule."""

    retries: int
    backoff_s: float
    detach_grace_s: float
    signals: HoldSignals
    view: HoldView
    effects: HoldEffects
    clock: Clock
    poll_s: float = 0.5
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    """Waits on ``clock``."""

    async def run(
        self, step: str, action: Callable[[], Awaitable[T]], *, leaving: End | None = None
    ) -> T:
        """Do ``action``; retry and hold as above.

        Args:
            step: plain name, part of the failure's fingerprint.
            action: one try; must be safe to repeat after a RetryBy.SESSION error.
            leaving: the end that owes this step: the request for it, which still stands, lets
                nothing go.

        Raises:
            StepEnded: if the step was held and then let go by a stop or by ``detach_grace``.
            RunError: any error with another retry authority, at once.
        """
        tries = 0
        last: Failure | None = None
        while True:
            try:
                value = await action()
            except RunError as error:
                if error.retry is not RetryBy.SESSION:
                    raise
                tries += 1
                failure = Failure.of(error, step=step, time=self.clock.time())
                await self._wait_before_retry(failure, tries, leaving)
                last = failure
            else:
                if last is not None:
                    self.view.recovered(last)
                if tries > self.retries:
                    self.effects.end()
                return value

    async def _wait_before_retry(self, failure: Failure, tries: int, leaving: End | None) -> None:
        # Equal fingerprints count between sessions (the chain knows them), not here: a restarted
        # engine may well fail its first publication in the same words.
        if tries <= self.retries:
            self.view.failed(failure, attempt=tries, held=False)
            await self._pause(self.backoff_s * 2 ** (tries - 1), failure, leaving)
            return
        self.effects.begin()
        self.view.failed(failure, attempt=tries, held=True)
        await self._hold(failure, leaving)
        self.effects.asked()

    async def _pause(self, seconds: float, failure: Failure, leaving: End | None) -> None:
        deadline = self.clock.monotonic() + seconds
        while (left := deadline - self.clock.monotonic()) > 0:
            self._leave_if_asked(failure, leaving)
            await self.sleep(min(self.poll_s, left))

    async def _hold(self, failure: Failure, leaving: End | None) -> None:
        since = self.clock.monotonic()
        while not self.signals.retry_requested(failure.id):
            self._leave_if_asked(failure, leaving)
            if self.clock.monotonic() - since > self.detach_grace_s:
                raise StepEnded(End(by=EndedBy.PARKED), failure)
            await self.sleep(self.poll_s)

    def _leave_if_asked(self, failure: Failure, leaving: End | None) -> None:
        end = self.signals.end_requested()
        if end is None or end == leaving:
            return
        # A run that leaves with all it owes does not owe less because its time is up.
        if leaving is None or end.by is not EndedBy.WALL_CLOCK:
            raise StepEnded(end, failure)
