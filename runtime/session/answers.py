"""What ``ensure`` can answer about a step."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.rundir.failure import Failure
from runtime.rundir.receipts import Receipt
from runtime.rundir.records import Activity, WorkflowState
from runtime.rundir.workflow import Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The step stands, and cannot be undone but by damage to a commit."""

    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Somebody works towards it."""

    what: str
    """What is being done, for people."""
    idle_s: float
    """Seconds since anything moved; deadlines count from there."""
    is_stale: bool
    """The session gives no sign of life, though its guard holds the run."""
    committed: int
    """Newest committed update, or -1."""
    view: Workflow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The session holds a failed step, everything in memory; ``control/retry-<id>`` tries again."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """What the caller has seen committed was undone: go on from the step after ``to``."""

    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Nobody works towards it, and a new epoch may."""

    reason: str
    attempt: int
    """The attempt that was lost; 0 if there was none. A launcher takes over from this one only."""
    failure: Failure | None = None
    """What ended the last epoch, if it left word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run ended before the step was reached; a new epoch is a person's decision."""

    state: WorkflowState
    activity: Activity | None
    """``parked`` or ``stopped`` where it can be resumed."""
    ended_by: str
    update: int
    reason: str
    failure: Failure | None = None


Answer = Done | Running | Held | Rewound | Lost | Ended
