"""An engine slot whose owner lives in this very process: for engines outside a session's Ray."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import anyio.to_thread

from runtime.engines.protocol import EngineAddress, EngineOwner


@dataclass(slots=True, kw_only=True)
class LocalSlot:
    """Implements ``runtime.engines.pool.SlotRunner``; the server ends with this process."""

    owner: EngineOwner

    async def start(self) -> EngineAddress:
        """See SlotRunner. The owner's own deadline bounds it."""
        return await anyio.to_thread.run_sync(self.owner.start)

    async def is_running(self) -> bool:
        """See SlotRunner."""
        return self.owner.is_running()

    async def stop(self) -> None:
        """See SlotRunner."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.owner.stop)
