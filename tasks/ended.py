"""A run that ended before the step a task waits for."""

from __future__ import annotations

from runtime.errors import RunError


class RunEnded(RunError):
    """The run stopped, parked or failed before the step; a new epoch is a person's decision.

    ``detail`` holds the workflow's ``state`` and ``activity``.
    """

    next_check = "milepost status; then milepost resume, or the failure's own next check"
