"""A pause by abort that ends as soon as the last aborted request is answered.

Upstream looks once a second whether it is, and a publication to an engine without per-token spans
would stand still for that second.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from runtime.engines.sglang.inside.plugin import wrap
from runtime.engines.sglang.inside.timing import Timing

POLL_S = 0.005


def hook_pauses(manager: Any) -> None:
    """Answer ``/pause_generation`` with mode ``abort`` without the second.

    Args:
        manager: module ``sglang.srt.managers.tokenizer_manager``.
    """
    wrap(manager.TokenizerManager, "pause_generation", _quick_abort)


def _quick_abort(original: Any) -> Any:
    @functools.wraps(original)
    async def pause(self: Any, obj: Any) -> None:
        if obj.mode != "abort":
            await original(self, obj)
            return
        with Timing("pause"):
            async with self.is_pause_cond:
                self.is_pause = True  # whatever comes from now on waits
                while True:
                    self.abort_request(abort_all=True)
                    if not await self.model_update_lock.is_locked():
                        return
                    await asyncio.sleep(POLL_S)

    return pause
