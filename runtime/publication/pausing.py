"""How an engine is paused for a swap, and what becomes of its cached prefixes.

Keys and values computed under old weights are never served as new ones. Three pairs are allowed:

=========  =====  =========================================================================
pause      flush  why it is right
=========  =====  =========================================================================
in_place   no     running requests go on over their old prefix: a mixed-policy response, whose
                  spans the engine reports; a new request carries the policy id as salt
abort      no     nothing runs any more; a new request's salt misses every old entry
abort      yes    nothing runs any more, and the engine takes no salt
=========  =====  =========================================================================

In place without salt is left out on purpose: a cache cannot be flushed under running requests, so
a new request could hit a prefix of the old policy and say it was prefilled by the new one.
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
    if mode == "refresh" and info.native_spans and info.takes_salt:
        return PausePlan(pause="in_place", flush=False)
    return PausePlan(pause="abort", flush=mode == "drain" or not info.takes_salt)
