"""How an engine is paused for a swap, and what becomes of its cached prefixes.

Keys and values computed under old weights are never served as new ones. These pairs are allowed:

=========  =====  =========================================================================
pause      flush  why it is right
=========  =====  =========================================================================
in_place   no     running requests go on over their old prefix: a mixed-policy response, whose
                  spans the engine reports; a new request carries the policy id as salt
retract    no     running requests give up their place and read prompt and partial again under
                  the new weights: exact, and dearer; the salt keeps new requests from old
                  entries, which cannot be flushed beside a waiting request
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
    if mode == "refresh" and info.native_spans and info.takes_salt:
        return PausePlan(pause=pause, flush=False)
    return PausePlan(pause="abort", flush=mode != "refresh" or not info.takes_salt)
