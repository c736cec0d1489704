"""An event loop that skips idle time: real sockets and real timers, and an hour takes no time."""

import asyncio
import selectors
import threading

_SETTLE_S = 0.002
"""What is under way inside the kernel arrives within this; a longer wait is skipped."""


class _Selector(selectors.DefaultSelector):
    """Returns at once where the loop would only have waited for its next timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self.skipped = 0.0

    def select(self, timeout=None):
        if timeout is None or timeout <= _SETTLE_S:
            return super().select(timeout)
        if _is_thread_at_work(self._loop):
            # Looked at before the wait: who ends in it has woken the loop first.
            return super().select(_SETTLE_S)
        ready = super().select(_SETTLE_S)
        if not ready:
            self.skipped += timeout
        return ready


def _is_thread_at_work(loop: asyncio.AbstractEventLoop) -> bool:
    """A worker thread of anyio's has something in hand for this loop: no time passes meanwhile.

    Threads of other loops have their own time: one that another test left behind stops nobody.
    """
    return any(
        getattr(thread, "loop", None) is loop and thread.queue.unfinished_tasks > 0
        for thread in threading.enumerate()
    )


class SkippingLoop(asyncio.SelectorEventLoop):
    """For loops that wait for timers, sockets and anyio's threads; for no other threads."""

    def __init__(self) -> None:
        self._skips = _Selector(self)
        super().__init__(self._skips)

    def time(self) -> float:
        return super().time() + self._skips.skipped
