"""What a trainer's handle and its ranks say to each other, besides numbers and weights.

These values travel to and from the session, whose process has no torch: unpickling one loads this
module.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Names one call, the same on every rank and on every repetition."""

    epoch: int
    update: int
    """The trainer's update when the call was made."""
    name: str
    serial: int
    """Counts the calls of a lane; a lower one than the last is an old call that came late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
