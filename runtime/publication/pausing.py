"""How an engine is paused for a swap, and what becomes of its cached prefixes.

Keys and values computed under old weights are never served as new ones. Allowed pairs:

=========  =====  =========================================================================
pause      flush  why it is right
=========  =====  =========================================================================
in_place   no     running requests go on over their old prefix: a mixed-policy response, whose
                  spans the engine reports; the engine forgets every prefix that old weights made
abort      no     nothing runs any more, and the engine forgets such prefixes
abort      yes    nothing runs any more, and nothing is left in the cache
=========  =====  =========================================================================

A salt is not enough for a swap without a flush. A request that waits inside the engine, or was on
its way when the engine was paused, comes with the old policy as its salt: under it the new weights
would find prefixes of the old ones and say they had read them. So either the engine itself forgets
them (``EngineInfo.forgets_prefixes``), or the cache is flushed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.engines.protocol import EngineInfo, PauseMode

PublicationMode = Literal["drain", "refresh"]


@dataclass(frozen=True, slots=True)
class PausePlan:
    """What one engine is told."""

    pause: PauseMode
    flush: bool


def plan_pause(info: EngineInfo, mode: PublicationMode) -> PausePlan:
    """Choose the pause for one engine; ``abort`` is abort-and-continue in ``refresh`` mode.

    In ``drain`` mode the requests have ended before, so ``abort`` finds none and only stops new
    ones.
    """
    if mode == "refresh" and info.native_spans and info.forgets_prefixes:
        return PausePlan(pause="in_place", flush=False)
    return PausePlan(pause="abort", flush=mode == "drain" or not info.forgets_prefixes)
