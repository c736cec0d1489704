"""Filters on finished groups (dynamic sampling), and the cap on how much they may reject."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from runtime.data.samples import Group
from runtime.errors import RunError


class FilterStarved(RunError):
    """Filters rejected more than rollout.filter_max_rounds allows between two collections."""

    next_check = (
        "the counts named here: rewards that are all equal mean a task too hard, too easy, or a "
        "verifier that does not read the responses; then rollout.filter"
    )


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
    """Counts judgements, in all and since the last collection was taken."""

    max_rejected: int
    """Groups that may be rejected between two collections."""
    judged: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    """By reason, in all."""
    _recent: Counter[str] = field(default_factory=Counter[str])
    _recent_judged: int = 0
    _recent_reward: float = 0.0

    def judge(self, group: Group, accept: GroupFilter | None) -> str | None:
        """Apply the filter.

        Raises:
            FilterStarved: if this rejection is one too many.
        """
        reason = None if accept is None else accept(group)
        self.judged += 1
        self._recent_judged += 1
        self._recent_reward += sum(group.rewards) / len(group.samples)
        if reason is not None:
            self.rejected[reason] += 1
            self._recent[reason] += 1
            if self._recent.total() > self.max_rejected:
                raise self._starved()
        return reason

    def taken(self) -> None:
        """A collection was taken: rounds count anew."""
        self._recent.clear()
        self._recent_judged, self._recent_reward = 0, 0.0

    def _starved(self) -> FilterStarved:
        mean = self._recent_reward / self._recent_judged
        return FilterStarved(
            f"filters rejected {self._recent.total()} of {self._recent_judged} groups since the "
            f"last collection ({dict(self._recent)}), mean reward {mean:.4g}; at most "
            f"{self.max_rejected} are allowed",
            judged=self._recent_judged,
            rejected=dict(self._recent),
            mean_reward=mean,
        )
