"""How an engine is paused for a swap, and what becomes of its cached prefixes.

Keys and values computed under old weights are never served as new ones. Allowed pairs:

=========  =====  =========================================================================
pause      flush  why it is right
=========  =====  =========================================================================
in_place   no     running requests go on over their old prefix: a mixed-policy response, whose
                  spans the engine reports; the engine forgets every prefix that old weights made
retract    no     running requests give up their place and read prompt and partial again under
                  the new weights: exact, and dearer; the engine forgets as above, for nothing
                  can be flushed beside a waiting request
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

PublicationMode = Literal["drain", "refresh", "rolling"]
RefreshPause = Literal["in_place", "retract", "abort"]


@dataclass(frozen=True, slots=True)
class PausePlan:
    """What one engine is told."""

    pause: PauseMode
    flush: bool


def plan_pause(
    info: EngineInfo, mode: PublicationMode, pause: RefreshPause = "in_place"
) -> PausePlan:
    """Choose the pause for one engine; ``abort`` is abort-and-continue in ``refresh`` mode.

    In ``drain`` mode, and at an engine's turn in ``rolling``, the requests have ended before, so
    ``abort`` finds none, or the stragglers, and stops new ones.

    Args:
        info: what the engine was seen to be able to do.
        mode: of the publication.
        pause: what is wanted in ``refresh``; taken where it is exact.
    """
    if mode == "refresh" and info.native_spans and info.forgets_prefixes:
        return PausePlan(pause=pause, flush=False)
    return PausePlan(pause="abort", flush=mode != "refresh" or not info.forgets_prefixes)
