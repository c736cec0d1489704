"""Who decodes when: the waiting queue, pauses, deadlines, and all that happens between steps.

One thread owns the decoder. The HTTP side hands requests over under a lock, within the queue limit,
and control work as functions that run between two steps; what has ended goes back through
``deliver``, one call per step. So the order of a pause, a weight swap and the next token is the
order in which they were asked for, and no weight ever changes inside a forward.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from runtime.engines.embedded.decoder import Decoder
from runtime.engines.embedded.requests import (
    ABORTED,
    ABORTED_WAITING,
    ENGINE_STOPPED,
    RAN_TOO_LONG,
    WAITED_TOO_LONG,
    Finish,
    Request,
    unavailable,
)
from runtime.engines.protocol import PauseMode
from runtime.telemetry.events import Event

T = TypeVar("T")

IDLE_S = 0.5
"""The thread looks at deadlines at least this often while it has nothing to do."""

_log = structlog.get_logger("engine")


class QueueFull(Exception):
    """More requests wait than the limit allows; none of the call's requests was taken."""


class DuplicateRid(Exception):
    """A request of this id is waiting or running."""


class EngineStopped(Exception):
    """The decoder's thread has ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step brought for a request that streams or has ended."""

    request: Request
    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None


class Scheduler:
    """The decoder's thread and its queue.

    Args:
        decoder: owned by the thread from ``start`` on.
        deliver: called from the thread after each step that ended or advanced something watched.
        max_queued: most requests not yet admitted; None: no limit.
        waiting_timeout_s: a request not admitted after this long ends with 503; None: never.
        running_timeout_s: a request running longer than this ends with 503; None: never.
        on_failure: called from the thread when a step raised: the thread ends then.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        decoder: Decoder,
        deliver: Callable[[list[Progress]], None],
        *,
        max_queued: int | None,
        waiting_timeout_s: float | None = None,
        running_timeout_s: float | None = None,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder = decoder
        self._deliver = deliver
        self._max_queued = max_queued
        self._waiting_timeout_s = waiting_timeout_s
        self._running_timeout_s = running_timeout_s
        self._on_failure = on_failure
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._rids: set[str] = set()
        self._paused: PauseMode | None = None
        self._paused_at_s = 0.0
        self._paused_for_s = 0.0
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    # Called from other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step it is in; what waits or runs is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """The thread runs."""
        return self._thread.is_alive()

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the present pause."""
        return self._paused

    @property
    def num_waiting(self) -> int:
        """Requests not admitted."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Raises:
            QueueFull: if they would exceed the limit.
            DuplicateRid: if an id is in use.
            EngineStopped: if the thread has ended.
        """
        with self._changed:
            self._check_alive()
            for request in requests:
                if request.rid in self._rids:
                    raise DuplicateRid(request.rid)
            if (
                self._max_queued is not None
                and len(self._waiting) + len(requests) > self._max_queued
            ):
                raise QueueFull
            now = self._open_time()
            for request in requests:
                request.arrived_s = now
                self._rids.add(request.rid)
                self._waiting.append(request)
            self._changed.notify()

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in the decoder's thread between two steps, paused or not.

        Raises:
            EngineStopped: if the thread has ended.
        """
        future: Future[T] = Future()
        with self._changed:
            self._check_alive()
            self._work.append((future, work))
            self._changed.notify()
        return future

    # Work to be passed to ``between_steps``

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding: end, requeue or freeze what runs. New requests wait."""
        if self._paused is None:
            self._paused_at_s = self._clock()
        self._paused = mode
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        """Decode again."""
        if self._paused is not None:
            with self._changed:
                self._paused_for_s += self._clock() - self._paused_at_s
                self._paused = None

    def abort(self, rids: set[str]) -> None:
        """End these requests, waiting or running; unknown ids are no error."""
        with self._changed:
            waiting = [r for r in self._waiting if r.rid in rids]
            for request in waiting:
                self._waiting.remove(request)
        self._end_waiting(waiting, ABORTED_WAITING)
        self._end_running([r for r in self.decoder.running() if r.rid in rids], ABORTED)

    def abort_all(self) -> None:
        """End everything."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        self._end_waiting(waiting, ABORTED_WAITING)
        self._end_running(self.decoder.running(), ABORTED)

    def is_idle(self) -> bool:
        """Nothing waits or runs."""
        return not self._waiting and not self.decoder.num_running

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait_for_something()
                while self._work:
                    self._do(*self._work.popleft())
                if self._paused is None and not self._stopping:
                    self._expire()
                    self._advance()
        except Exception as error:
            self._failure = error
            _log.exception(Event.ENGINE_DECODER_FAILED)
        finally:
            with self._changed:
                self._stopping = True
                left = [*self._waiting, *self.decoder.running()]
                self._waiting.clear()
            # The failed step may have left the decoder in any state: nothing partial is handed out.
            for request in left:
                request.finish = unavailable(ENGINE_STOPPED)
            self._deliver([Progress(r, [], [], r.finish) for r in left])
            while self._work:
                future, _ = self._work.popleft()
                future.set_exception(EngineStopped())
            if self._failure is not None:
                self._on_failure()

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:  # belongs to whoever asked; the thread goes on
                future.set_exception(error)

    def _wait_for_something(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: bool(
                    self._stopping
                    or self._work
                    or (self._paused is None and (self._waiting or self.decoder.num_running))
                ),
                timeout=IDLE_S,
            )

    def _advance(self) -> None:
        """Admit what fits, then one step for everyone."""
        admitted: list[Request] = []
        with self._changed:
            now = self._open_time()
            for _ in range(self.decoder.num_that_fit(self._waiting)):
                request = self._waiting.popleft()
                if request.started_s is None:
                    request.started_s = now
                admitted.append(request)
        ended = self.decoder.admit(admitted) if admitted else []
        ended += self.decoder.step()
        progress = [Progress(r, r.output, r.logprobs, r.finish) for r in ended]
        self._forget(ended)
        progress += [
            Progress(r, *self.decoder.progress(r), None)
            for r in self.decoder.running()
            if r.streams
        ]
        if progress:
            self._deliver(progress)

    def _expire(self) -> None:
        now = self._open_time()
        if self._waiting_timeout_s is not None and self._waiting:
            before = now - self._waiting_timeout_s
            with self._changed:
                # A retracted request has been running: the running limit is the one that counts.
                late = [r for r in self._waiting if r.arrived_s < before and r.started_s is None]
                for request in late:
                    self._waiting.remove(request)
            self._end_waiting(late, unavailable(WAITED_TOO_LONG))
        if self._running_timeout_s is not None:
            before = now - self._running_timeout_s
            late = [
                r
                for r in self.decoder.running()
                if r.started_s is not None and r.started_s < before
            ]
            self._end_running(late, unavailable(RAN_TOO_LONG))

    def _retract(self) -> None:
        """Put running requests back at the head of the queue, without their KV."""
        running = sorted(self.decoder.running(), key=lambda r: r.arrived_s)
        self.decoder.evict(running)
        for request in running:
            request.num_retractions += 1
        with self._changed:
            self._waiting.extendleft(reversed(running))

    def _end_waiting(self, requests: list[Request], finish: Finish) -> None:
        for request in requests:
            # A retracted one has tokens already: it ends like a running one.
            request.finish = ABORTED if request.output and finish is ABORTED_WAITING else finish
            request.version = self.decoder.version
        self._end(requests)

    def _end_running(self, requests: list[Request], finish: Finish) -> None:
        self.decoder.evict(requests)
        for request in requests:
            request.finish = finish
        self._end(requests)

    def _end(self, requests: list[Request]) -> None:
        self._forget(requests)
        if requests:
            self._deliver([Progress(r, r.output, r.logprobs, r.finish) for r in requests])

    def _forget(self, requests: Sequence[Request]) -> None:
        with self._changed:
            self._rids.difference_update(r.rid for r in requests)

    def _open_time(self) -> float:
        """Clock of deadlines: stands still while paused."""
        now = self._paused_at_s if self._paused is not None else self._clock()
        return now - self._paused_for_s

    def _check_alive(self) -> None:
        if self._stopping:
            raise EngineStopped from self._failure
