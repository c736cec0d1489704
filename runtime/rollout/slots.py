"""Sample slots: how many samples may be generated at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio


class SampleSlots:
    """A counted bound. Whole groups take all their slots at once; later turns take theirs in order.

    Args:
        limit: slots in all.
        on_free: called when slots are free and no later turn waits for them.
    """

    def __init__(self, limit: int, *, on_free: Callable[[], None]) -> None:
        self._limit = limit
        self._free = limit
        self._on_free = on_free
        self._waiters: deque[tuple[int, anyio.Event]] = deque()

    @property
    def free(self) -> int:
        """Slots nobody has."""
        return self._free

    @property
    def used(self) -> int:
        """Slots taken."""
        return self._limit - self._free

    def fits(self, count: int) -> bool:
        """A new group of ``count`` may go out; groups under way that wait for a slot come first."""
        return not self._waiters and count <= self._free

    def take_now(self, count: int) -> None:
        """Take slots that ``fits`` promised."""
        self._free -= count

    async def take(self, count: int) -> None:
        """Wait for ``count`` (<= limit) slots, first come, first served."""
        if self.fits(count):
            self._free -= count
            return
        granted = anyio.Event()
        self._waiters.append((count, granted))
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.give(count)
            else:
                self._waiters.remove((count, granted))
                self.give(0)
            raise

    def give(self, count: int) -> None:
        """Give slots back; waiting turns are served first."""
        self._free += count
        while self._waiters and self._waiters[0][0] <= self._free:
            wanted, granted = self._waiters.popleft()
            self._free -= wanted
            granted.set()
        if not self._waiters and self._free:
            self._on_free()
