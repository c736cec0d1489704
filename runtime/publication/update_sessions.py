"""The weight-update session of engines that have one, also after a try that left one open."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from runtime.errors import EngineRefused
from runtime.publication.protocol import Target


@dataclass(slots=True)
class UpdateSessions:
    """Which incarnations may have an open session."""

    _open: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])

    async def begin(self, target: Target) -> None:
        """Open one; a session that a failed try left open is closed before."""
        key = (target.slot, target.incarnation)
        if key in self._open:
            with contextlib.suppress(EngineRefused):
                await target.client.end_update()
        self._open.add(key)
        await target.client.begin_update()

    async def end(self, target: Target) -> None:
        """Close it."""
        await target.client.end_update()
        self._open.discard((target.slot, target.incarnation))

    def ended(self, slot: int, incarnation: str) -> None:
        """The incarnation is gone, and its session with it."""
        self._open.discard((slot, incarnation))
