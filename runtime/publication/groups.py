"""Who is which rank of a broadcast group: planned here for all sides, in one order.

Two sides that each made up their own order of groups or ranks would wait for each other for ever.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.publication.protocol import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One collective group: the trainer's rank 0 is rank 0, engines follow by slot."""

    name: str
    """New for every group that is made: a store may outlive the group it was made for."""
    host: str
    """Where rank 0 holds the store."""
    port: int
    backend: str
    members: tuple[tuple[int, str], ...]
    """(slot, incarnation) of each engine, by slot."""
    ranks_per_engine: int

    @property
    def world_size(self) -> int:
        """All ranks, the trainer's included."""
        return 1 + len(self.members) * self.ranks_per_engine

    def rank_offset(self, slot: int) -> int:
        """First rank of the engine at ``slot``; KeyError if it is no member."""
        for i, (member, _) in enumerate(self.members):
            if member == slot:
                return 1 + i * self.ranks_per_engine
        raise KeyError(slot)


def plan_group(
    targets: Sequence[Target], *, host: str, port: int, backend: str, ranks_per_engine: int
) -> GroupPlan:
    """Plan a group over these engines, in whatever order they are given."""
    return GroupPlan(
        name=f"milepost-{secrets.token_hex(4)}",
        host=host,
        port=port,
        backend=backend,
        members=members_of(targets),
        ranks_per_engine=ranks_per_engine,
    )


def members_of(targets: Sequence[Target]) -> tuple[tuple[int, str], ...]:
    """The identity of a group over these engines."""
    return tuple(sorted((t.slot, t.incarnation) for t in targets))
