"""Finished groups on their way to the trainer: oldest first, and nothing dropped.

The bound is back-pressure, not loss: a group that finishes when the buffer is full waits for room,
and while one waits no new group is admitted. Both kinds are held here in one order, since the
trainer may have to wait for a group that itself waits for room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.data.samples import Group

TakesLeft = Callable[[int], int]
"""Maps the update of a group's oldest policy to the takes it may still wait; 0: only this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedGroup:
    """A group with rewards. Compared by identity."""

    group: Group
    order: int
    """Admissions before it."""
    num_stale: int
    """How often its prompt was sent back as too old; from 1 on the trainer waits for it."""
    oldest: int = field(init=False)
    """Update of the oldest policy in it; looked for once, and asked for at every take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "oldest", self.group.oldest.update)

    @property
    def age_key(self) -> tuple[int, int]:
        """Oldest policy first, then the one admitted first."""
        return (self.oldest, self.order)


class Buffer:
    """Finished groups, unordered until one is taken.

    Args:
        bound: groups it holds before it pushes back.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._groups: list[FinishedGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting_for_room(self) -> int:
        """Finished groups beyond the bound."""
        return max(0, len(self._groups) - self.bound)

    def add(self, finished: FinishedGroup) -> None:
        """A group finished."""
        self._groups.append(finished)

    def remove(self, picked: Iterable[FinishedGroup]) -> None:
        """Taken, or too old."""
        gone = {id(finished) for finished in picked}
        self._groups = [finished for finished in self._groups if id(finished) not in gone]

    def older_than(self, update: int) -> list[FinishedGroup]:
        """Groups whose oldest policy is below ``update``, oldest first."""
        found = [f for f in self._groups if f.oldest < update]
        return sorted(found, key=lambda f: f.age_key)

    def oldest_first(self) -> list[FinishedGroup]:
        """Everything, in the order it is given out."""
        return sorted(self._groups, key=lambda f: f.age_key)

    def pick(
        self, count: int, takes_left: TakesLeft, awaited: Sequence[int]
    ) -> list[FinishedGroup] | None:
        """Choose a collection, or None where the trainer must wait.

        Oldest first, but a group that was sent back as too old once may not be passed over again:
        of those due within j further takes at most ``count`` * j may be left behind. There is room
        for that: the bound on admissions leaves at most ``count`` groups for each take to come.

        Args:
            count: groups of a collection.
            takes_left: see ``TakesLeft``; no group here is negative by it.
            awaited: oldest updates of groups under way that the trainer must wait for.
        """
        ready = self.oldest_first()
        owed = [f for f in ready if f.num_stale]
        due = [takes_left(f.oldest) for f in owed]
        due += [max(0, takes_left(update)) for update in awaited]
        picked: list[FinishedGroup] = []
        for left in sorted(set(due)):
            num_due = sum(1 for d in due if d <= left)
            num_picked = sum(1 for f in picked if takes_left(f.oldest) <= left)
            missing = min(num_due - count * left, count) - num_picked
            if missing <= 0:
                continue
            able = [f for f in owed if f not in picked and takes_left(f.oldest) <= left]
            if len(able) < missing:
                return None
            picked += able[:missing]
        rest = [f for f in ready if f not in picked]
        picked += rest[: max(0, count - len(picked))]
        return picked if len(picked) == count else None
