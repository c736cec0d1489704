"""An event loop that skips idle time: real sockets and real timers, and an hour takes no time."""

import asyncio
import selectors
import threading

_SETTLE_S = 0.002
"""What is under way inside the kernel arrives within this; a longer wait is skipped."""


class _Selector(selectors.DefaultSelector):
    """Returns at once where the loop would only have waited for its next timer."""

    skipped = 0.0

    def select(self, timeout=None):
        if timeout is None or timeout <= _SETTLE_S:
            return super().select(timeout)
        if _is_thread_at_work():
            # Looked at before the wait: who ends in it has woken the loop first.
            return super().select(_SETTLE_S)
        ready = super().select(_SETTLE_S)
        if not ready:
            self.skipped += timeout
        return ready


def _is_thread_at_work() -> bool:
    """A worker thread of anyio's has something in hand; however long it takes, no time passes."""
    queues = (getattr(thread, "queue", None) for thread in threading.enumerate())
    return any(getattr(queue, "unfinished_tasks", 0) > 0 for queue in queues)


class SkippingLoop(asyncio.SelectorEventLoop):
    """For loops that wait for timers, sockets and anyio's threads; for no other threads."""

    def __init__(self) -> None:
        self._skips = _Selector()
        super().__init__(self._skips)

    def time(self) -> float:
        return super().time() + self._skips.skipped
