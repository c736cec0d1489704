"""What became of an attempt: one class, beside the scheduler's own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from runtime.rundir.records import Activity


class AttemptClass(StrEnum):
    """Where an attempt stands. No class promises a retry."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    CANCELED = "canceled"
    STOPPED = "stopped"
    """Over, outcome unknown."""

    @property
    def is_over(self) -> bool:
        """Nothing of it runs or will run."""
        return self not in (AttemptClass.PENDING, AttemptClass.STARTING, AttemptClass.RUNNING)

    @property
    def is_taken_away(self) -> bool:
        """Its hardware was lost from outside."""
        return self in (AttemptClass.PREEMPTED, AttemptClass.INTERRUPTED)


_GRAVITY = (
    AttemptClass.PREEMPTED,
    AttemptClass.CANCELED,
    AttemptClass.FAILED,
    AttemptClass.INTERRUPTED,
    AttemptClass.STOPPED,
    AttemptClass.PENDING,
    AttemptClass.STARTING,
    AttemptClass.RUNNING,
    AttemptClass.SUCCEEDED,
)
"""Of the ranks of a group, the first of these that any has is the group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """The newest job of one rank."""

    rank: int
    kind: AttemptClass
    raw: str
    """The scheduler's own status, with its code."""
    reason: str = ""
    """Why it waits or ended, for a person."""
    host: str = ""
    job: str = ""
    is_secondary: bool = False
    """It only followed a sibling: the sibling's class counts."""
    exit_code: int | None = None
    """Of its process; None where it has none, or the scheduler does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStanding:
    """One attempt as its scheduler tells it."""

    kind: AttemptClass
    raw: str
    reason: str = ""
    exit_code: int | None = None
    """The guard's, which is rank 0's; None while it runs, or where the scheduler does not tell."""
    is_known: bool = True
    """False: its scheduler has no job under its name."""
    is_turned_away: bool = False
    """Another process owned the run: this attempt trained nothing, or nothing more."""
    is_unconfirmed: bool = False
    """Its process left in good order, and its end is not to be seen in the run directory."""
    activity: Activity | None = None
    """``stopped`` or ``parked`` where it ended as was asked, and the run can go on; else None."""
    ranks: tuple[RankStanding, ...] = ()
    oddities: tuple[str, ...] = ()
    """What is off about the group: ids, ranks, leader selection."""
    requested_gpus: int | None = None
    active_gpus: int | None = None
    allocated_gpus: int | None = None
    detail: dict[str, str] = field(default_factory=dict[str, str])


def of_ranks(ranks: Sequence[RankStanding], oddities: Sequence[str] = ()) -> AttemptStanding:
    """The class of a group from its ranks: who was hit first counts, not who followed.

    Rank 0 has the guard. Any other rank leaves as soon as rank 0's Ray does, and then its exit says
    nothing of why: it waits for rank 0 to be over.

    Args:
        ranks: the newest job of each rank; at least one.
        oddities: what is off about the group.
    """
    leader = next((each for each in ranks if each.rank == 0), None)
    counted = list(ranks)
    if leader is not None and not leader.kind.is_over:
        counted = [each for each in ranks if each.kind is not AttemptClass.FAILED]
    first = [each for each in counted if not each.is_secondary] or counted
    over = [each for each in first if each.kind.is_over]
    # Ranks that still run beside one that was taken away only have not heard of it yet.
    kinds = [each.kind for each in first]
    lost = [k for k in kinds if k.is_over and k is not AttemptClass.SUCCEEDED]
    kind = min(lost or kinds, key=_GRAVITY.index)
    chosen = next(each for each in (over or first) + first if each.kind is kind)
    return AttemptStanding(
        kind=kind,
        raw=chosen.raw,
        reason=chosen.reason if len(ranks) == 1 else _of_rank(chosen),
        exit_code=leader.exit_code if leader is not None else None,
        ranks=tuple(sorted(ranks, key=lambda each: each.rank)),
        oddities=tuple(oddities),
    )


def _of_rank(each: RankStanding) -> str:
    where = f" on {each.host}" if each.host else ""
    return f"rank {each.rank}{where}: {each.reason or each.raw}"
