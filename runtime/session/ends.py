"""Every way a run can end, and what each one owes (spec: ends of a run)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class EndedBy(StrEnum):
    """Why the loop stopped."""

    MAX_UPDATES = "max_updates"
    DATA = "data"
    WALL_CLOCK = "wall_clock"
    STOP_FINAL = "stop_final"
    STOP = "stop"
    SIGTERM = "sigterm"
    PARKED = "parked"
    DEBUG_EXIT = "debug_exit"


_OVER = frozenset({EndedBy.MAX_UPDATES, EndedBy.DATA, EndedBy.WALL_CLOCK, EndedBy.STOP_FINAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The reason the loop stopped, and what is owed before the processes leave."""

    by: EndedBy

    @property
    def is_complete(self) -> bool:
        """The run is over for good; otherwise it can be resumed."""
        return self.by in _OVER

    @property
    def owes_export(self) -> bool:
        """An HF export is due (when ``output.export_hf`` is on)."""
        return self.is_complete

    @property
    def owes_evaluation(self) -> bool:
        """The final evaluation is due (when ``evaluation.final`` is on)."""
        return self.is_complete

    @property
    def activity(self) -> Literal["parked", "stopped"]:
        """The workflow activity this end leaves behind."""
        return "parked" if self.by is EndedBy.PARKED else "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """Bounds of this attempt, from the run file."""

    max_updates: int | None
    """Target of the run, a boundary; None where the data's end decides."""
    data_updates: int
    """Update that the last collection of the last pass makes, if no group is filtered."""
    max_run_seconds: float | None
    debug_exit_after: int | None
    first_update: int
    """The update this attempt resumed from."""

    def reached(self, update: int) -> End | None:
        """The end that the run itself has reached: nothing is left to train, whatever is asked."""
        if self.max_updates is not None and update >= self.max_updates:
            return End(by=EndedBy.MAX_UPDATES)
        if update >= self.data_updates:
            return End(by=EndedBy.DATA)
        return None

    def after(self, update: int, *, age_s: float) -> End | None:
        """Judge a boundary.

        Args:
            update: updates made so far in committed order.
            age_s: seconds since this attempt's driver started, start-up included.

        Returns:
            The end that is due, or None. Reaching the target wins over a debug exit at the same
            update.
        """
        if (reached := self.reached(update)) is not None:
            return reached
        if self.max_run_seconds is not None and age_s >= self.max_run_seconds:
            return End(by=EndedBy.WALL_CLOCK)
        if (
            self.debug_exit_after is not None
            and update - self.first_update >= self.debug_exit_after
        ):
            return End(by=EndedBy.DEBUG_EXIT)
        return None
