"""Wakes whoever waits for something to change."""

from __future__ import annotations

import anyio


class Signal:
    """A notification without a memory: check the condition, then wait, with no await in between."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    async def wait(self) -> None:
        """Wait for the next ``notify``."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    def notify(self) -> None:
        """Wake everybody who waits now. Free when nobody does."""
        event, self._event = self._event, None
        if event is not None:
            event.set()
