"""An event loop that skips idle time: real sockets and real timers, and an hour takes no time."""

import asyncio
import selectors

_SETTLE_S = 0.002
"""What is under way inside the kernel arrives within this; a longer wait is skipped."""


class _Selector(selectors.DefaultSelector):
    """Returns at once where the loop would only have waited for its next timer."""

    skipped = 0.0

    def select(self, timeout=None):
        if timeout is None or timeout <= _SETTLE_S:
            return super().select(timeout)
        ready = super().select(_SETTLE_S)
        if not ready:
            self.skipped += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """For loops that do all they do in one thread; whoever waits for a thread blocks truly."""

    def __init__(self) -> None:
        self._skips = _Selector()
        super().__init__(self._skips)

    def time(self) -> float:
        return super().time() + self._skips.skipped
