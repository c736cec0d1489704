"""The admission gate: open for training, shut while evaluation has the shared engines.

Training calls pass it on their way to an engine. While it is shut they wait outside and keep their
place; those already inside run out. A call gives its place back at the HTTP answer, before reward
and buffer. A publication does not use the gate (requests go on over a refresh); it only never
coincides with a shared evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from runtime import faults
from runtime.clock import Clock
from runtime.errors import ContractViolation, WaitTimeout
from runtime.telemetry.events import Event

Sleep = Callable[[float], Awaitable[None]]
GateListener = Callable[[Event, Mapping[str, object]], None]

JOIN_DEADLINE_S = 30.0
"""For calls that were cancelled to come back; only a client that swallows cancellation needs it."""


class AdmittedCall:
    """A training call inside the gate, or waiting for it."""

    __slots__ = ("cut", "granted")

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut
        self.granted: anyio.Event | None = None


class EvaluationAdmission:
    """Evaluation's own way to the engines, while training's is shut and drained."""

    def __init__(self, max_calls: int) -> None:
        self._limit = anyio.CapacityLimiter(max_calls)
        self.is_over = False

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[None, None]:
        """Hold one of ``max_calls`` places for the length of one HTTP call.

        Raises:
            ContractViolation: if the evaluation has ended.
        """
        async with self._limit:
            if self.is_over:
                raise ContractViolation("an evaluation call came after its evaluation had ended")
            yield

    @property
    def active(self) -> int:
        """Calls under way."""
        return self._limit.borrowed_tokens


class AdmissionGate:
    """Open or shut for training calls; counts who is inside and who waits. One event loop."""

    def __init__(self, *, clock: Clock, sleep: Sleep = anyio.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._opened_at: float | None = clock.monotonic()
        self._open_s = 0.0
        self._active: dict[AdmittedCall, None] = {}
        self._waiters: deque[AdmittedCall] = deque()
        self._left = anyio.Event()
        self._turn = anyio.Lock()
        self._listeners: list[GateListener] = []

    # --- Training calls -------------------------------------------------------------------------

    async def enter(self, cut: Callable[[], None]) -> AdmittedCall:
        """Wait until training calls are admitted, first come, first served; then be inside.

        Args:
            cut: called at a drain deadline if the call is still inside then; it has the call's
                group cancelled and requeued, and must not block.

        Returns:
            The place, to be handed to ``leave`` at the HTTP answer, whatever it was.
        """
        if faults.plan is not None:
            await faults.plan.pause("gate.enter")
        call = AdmittedCall(cut)
        if self.is_open:
            self._active[call] = None
            return call
        call.granted = anyio.Event()
        self._waiters.append(call)
        try:
            await call.granted.wait()
        except BaseException:
            # Cancelled: outside it gives up its place, or the one that opening granted meanwhile.
            if call in self._active:
                self.leave(call)
            else:
                self._waiters.remove(call)
            raise
        return call

    def leave(self, call: AdmittedCall) -> None:
        """The call has its answer, or was given up."""
        del self._active[call]
        if not self._active:
            self._left.set()

    # --- Open and shut --------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Training calls are admitted."""
        return self._opened_at is not None

    @property
    def waiters(self) -> int:
        """Training calls outside."""
        return len(self._waiters)

    @property
    def active(self) -> int:
        """Training calls inside."""
        return len(self._active)

    def open_seconds(self) -> float:
        """Time the gate has been open in all: the clock that group deadlines run by."""
        if self._opened_at is None:
            return self._open_s
        return self._open_s + self._clock.monotonic() - self._opened_at

    def shut(self, reason: str) -> None:
        """Admit no more training calls; those inside go on. Idempotent.

        Args:
            reason: for the record.
        """
        if self._opened_at is None:
            return
        self._open_s += self._clock.monotonic() - self._opened_at
        self._opened_at = None
        self._tell(Event.GENERATION_PAUSED, reason=reason, active=self.active)

    async def close(self, *, drain_deadline_s: float, reason: str) -> int:
        """Shut the gate and wait until nobody is inside.

        Also when it was shut already, so that a retry can ask again. However it ends, the gate is
        shut afterwards; ``open`` is a decision of the caller.

        Args:
            drain_deadline_s: for the calls inside, in a server's queue too. Past it they are cut:
                their groups are cancelled, joined and requeued (a lifecycle matter, no failure).
            reason: for the record.

        Returns:
            How many calls were cut.

        Raises:
            WaitTimeout: if a cut call does not come back.
        """
        if faults.plan is not None:
            await faults.plan.pause("gate.close")
        self.shut(reason)
        if await self._drained_within(drain_deadline_s):
            return 0
        stragglers = list(self._active)
        for call in stragglers:
            call.cut()
        if not await self._drained_within(JOIN_DEADLINE_S):
            raise WaitTimeout(
                f"waited {JOIN_DEADLINE_S:g} s for {self.active} cancelled generation calls to end",
                calls=self.active,
            )
        return len(stragglers)

    def open(self) -> None:
        """Admit training calls again, the longest waiting first. Idempotent."""
        if faults.plan is not None:
            faults.plan.reach("gate.open")
        if self.is_open:
            return
        self._opened_at = self._clock.monotonic()
        self._tell(Event.GENERATION_RESUMED, waiters=self.waiters)
        while self._waiters:
            call = self._waiters.popleft()
            self._active[call] = None
            assert call.granted is not None
            call.granted.set()

    # --- Who has the engines --------------------------------------------------------------------

    @asynccontextmanager
    async def evaluation(
        self, *, drain_deadline_s: float, max_calls: int
    ) -> AsyncGenerator[EvaluationAdmission, None]:
        """Have the engines for evaluation alone.

        Waits for a publication under way, shuts the gate and drains it. On success the gate opens.
        On any failure it stays shut: the session enters again to retry, or opens it, or ends.
        """
        async with self._turn:
            if faults.plan is not None:
                await faults.plan.pause("gate.evaluation")
            await self.close(drain_deadline_s=drain_deadline_s, reason="evaluation")
            admission = EvaluationAdmission(max_calls)
            try:
                yield admission
            finally:
                admission.is_over = True
            self.open()

    @asynccontextmanager
    async def publication(self) -> AsyncGenerator[None, None]:
        """Keep shared evaluation out while weights are swapped; training calls are not touched."""
        async with self._turn:
            if faults.plan is not None:
                await faults.plan.pause("gate.publication")
            yield

    def listen(self, listener: GateListener) -> None:
        """Tell ``listener`` of ``GENERATION_PAUSED`` and ``GENERATION_RESUMED``."""
        self._listeners.append(listener)

    # --- Inside -------------------------------------------------------------------------------

    async def _drained_within(self, seconds: float) -> bool:
        if not self._active:
            return True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._expire, seconds, tasks.cancel_scope)
            while self._active:
                self._left = anyio.Event()
                await self._left.wait()
            tasks.cancel_scope.cancel()
        return not self._active

    async def _expire(self, seconds: float, scope: anyio.CancelScope) -> None:
        await self._sleep(seconds)
        scope.cancel()

    def _tell(self, event: Event, **fields: object) -> None:
        for listener in self._listeners:
            listener(event, fields)
