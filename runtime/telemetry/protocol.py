"""What a place for metrics is: rows of values on an axis of their own.

Guarantees every sink gives: ``log`` returns at once, raises nothing, and takes calls from any
thread; ``finish`` ends within its own deadline, raises nothing, and may be called twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol


class Axis(StrEnum):
    """The axes. A tracking service's own step only counts rows and means nothing."""

    TRAIN = "train/update"
    ROLLOUT = "rollout/collection"
    ERRORS = "errors/elapsed_seconds"
    EVALUATION = "evaluation/update"

    @property
    def groups(self) -> tuple[str, ...]:
        """Metric groups that live on this axis, as globs."""
        return _GROUPS[self]


_GROUPS: dict[Axis, tuple[str, ...]] = {
    Axis.TRAIN: ("train/*", "publication/*", "checkpoint/*", "contracts/*"),
    Axis.ROLLOUT: ("rollout/*",),
    Axis.ERRORS: ("errors/*",),
    Axis.EVALUATION: ("evaluation/*",),
}


class TrackingSink(Protocol):
    """A place metrics go to."""

    def log(self, axis: Axis, step: float, values: Mapping[str, float | None]) -> None:
        """Write one row.

        Args:
            axis: what ``step`` counts.
            step: an update, a collection id, or seconds since the session's start.
            values: metrics by full name (``train/loss``); None where not measured, never 0 for
                that.
        """
        ...

    def finish(self) -> None:
        """Write the rest and close. Idempotent."""
        ...
