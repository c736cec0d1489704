"""What has been produced and is not consumed for good: the buffer, and what the trainer has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.data.ledger import STALE, GroupKey, Ledger
from runtime.data.samples import Collection, Group
from runtime.errors import ContractViolation
from runtime.policy import PolicyId
from runtime.rollout.buffer import Buffer, FinishedGroup
from runtime.rollout.settings import ProducerSettings


class Stock:
    """Turns finished groups into collections and keeps count of what holds room. Sync.

    A group holds room from its admission until the publication that follows its consumption.

    Args:
        settings: bounds.
        ledger: gets groups that grew too old back.
        next_collection: id of the first collection.
    """

    def __init__(self, settings: ProducerSettings, ledger: Ledger, *, next_collection: int) -> None:
        self._settings = settings
        self._ledger = ledger
        self._next_collection = next_collection
        self._taken: set[GroupKey] = set()
        self._num_consumed = 0
        self.buffer = Buffer(settings.max_buffered_groups)

    @property
    def num_in_training(self) -> int:
        """Groups taken, consumed ones included until the next publication."""
        return len(self._taken) + self._num_consumed

    @property
    def num_holding_room(self) -> int:
        """Groups here that count against the bound on admissions."""
        return len(self.buffer) + self.num_in_training

    def take(
        self, num_groups: int, trainer: PolicyId, *, awaited: Sequence[int], is_last: bool
    ) -> Collection | None:
        """Make a collection, or say with None that the trainer must wait.

        Args:
            num_groups: groups of a whole collection.
            trainer: its policy now.
            awaited: oldest updates of groups under way that were sent back as too old before.
            is_last: nothing else will come, so a short collection is right.

        Raises:
            ContractViolation: if the trainer's policy is of another epoch.
        """
        if trainer.epoch != self._settings.epoch:
            raise ContractViolation(
                f"a trainer at {trainer} asked the producer of epoch {self._settings.epoch}"
            )
        picked = self._pick(num_groups, trainer, awaited, is_last)
        if picked is None:
            return None
        self.buffer.remove(picked)
        self._taken.update((f.group.prompt.id, f.group.attempt) for f in picked)
        groups = sorted((f.group for f in picked), key=lambda group: group.prompt.id)
        collection = Collection(id=self._next_collection, groups=tuple(groups), taken_at=trainer)
        self._next_collection += 1
        return collection

    def _pick(
        self, num_groups: int, trainer: PolicyId, awaited: Sequence[int], is_last: bool
    ) -> list[FinishedGroup] | None:
        if is_last and 0 < len(self.buffer) <= num_groups:
            return self.buffer.oldest_first()
        return self.buffer.pick(
            num_groups,
            lambda oldest: self._settings.takes_left(oldest, trainer.update),
            awaited,
        )

    def send_back_older_than(self, update: int) -> int:
        """Requeue finished groups whose oldest policy is below ``update``; returns how many.

        Each goes to the head of the queue; the oldest ends up first.
        """
        aged = self.buffer.older_than(update)
        self.buffer.remove(aged)
        for finished in reversed(aged):
            self._ledger.requeue(finished.group.prompt.id, finished.group.attempt, STALE)
        return len(aged)

    def consumed(self, groups: Iterable[Group]) -> None:
        """The ledger has these as consumed.

        Raises:
            ContractViolation: if one of them was not taken, or is named twice.
        """
        for group in groups:
            key = (group.prompt.id, group.attempt)
            if key not in self._taken:
                raise ContractViolation(f"group {group.prompt.id} was consumed but never taken")
            self._taken.remove(key)
            self._num_consumed += 1

    def published(self) -> None:
        """What was consumed gives its room back."""
        self._num_consumed = 0
