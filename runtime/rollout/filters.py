"""Filters on finished groups (dynamic sampling), and the cap on how much they may reject."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from runtime.data.samples import Group
from runtime.errors import FilterStarved


class GroupFilter(Protocol):
    """Decides whether a judged group is worth training on."""

    def __call__(self, group: Group) -> str | None:
        """Why the group is rejected, in a word, or None to let it through. Quick and pure."""
        ...


def equal_rewards(group: Group) -> str | None:
    """Reject groups without a gradient: all rewards are equal."""
    return "equal_rewards" if group.is_equal else None


@dataclass(slots=True, kw_only=True)
class FilterRounds:
    """Counts judgements, in all and towards the collection that is being filled.

    Generation runs ahead of the trainer, so rounds are counted by what is accepted and not by what
    is taken: with ``groups_per_collection`` accepted groups a new count begins.
    """

    groups_per_collection: int
    max_rounds: int
    """Collections' worth of groups that may be rejected for one accepted collection."""
    rejected: Counter[str] = field(default_factory=Counter[str])
    """By reason, in all."""
    _round_rejected: Counter[str] = field(default_factory=Counter[str])
    _round_accepted: int = 0
    _round_reward: float = 0.0

    def judge(self, group: Group, accept: GroupFilter | None) -> str | None:
        """Apply the filter; returns why it rejects, or None.

        Raises:
            FilterStarved: if this rejection is one too many.
        """
        reason = None if accept is None else accept(group)
        self._round_reward += sum(group.rewards) / len(group.samples)
        if reason is None:
            self._accepted()
            return None
        self.rejected[reason] += 1
        self._round_rejected[reason] += 1
        if self._round_rejected.total() > self.max_rounds * self.groups_per_collection:
            raise self._starved()
        return reason

    def _accepted(self) -> None:
        self._round_accepted += 1
        if self._round_accepted == self.groups_per_collection:
            self._round_rejected.clear()
            self._round_accepted, self._round_reward = 0, 0.0

    def _starved(self) -> FilterStarved:
        rejected = self._round_rejected.total()
        judged = rejected + self._round_accepted
        mean = self._round_reward / judged
        return FilterStarved(
            f"filters rejected {rejected} of {judged} groups ({dict(self._round_rejected)}), mean "
            f"reward {mean:.4g}, and have not let a collection of {self.groups_per_collection} "
            f"through; rollout.filter_max_rounds is {self.max_rounds}",
            judged=judged,
            rejected=dict(self._round_rejected),
            mean_reward=mean,
        )
