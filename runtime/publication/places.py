"""Where snapshots lie, and who may still be reading there.

A snapshot is leased to an engine from the moment it is told to load it until it has answered or is
gone. Its place is used again only when nobody wants it and nobody reads it; two take turns then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.policy import PolicyId

Reader = tuple[int, str]
"""(slot, incarnation)"""


@dataclass(slots=True, eq=False)
class Place:
    """One folder, or one set of buffers."""

    number: int
    readers: set[Reader] = field(default_factory=set[Reader])
    """Incarnations that were told to load it and have not answered."""
    is_wanted: bool = True
    """A publication may still need it."""


@dataclass(slots=True)
class Places:
    """All places of one transport."""

    _all: list[Place] = field(default_factory=list[Place])
    _current: dict[PolicyId, Place] = field(default_factory=dict[PolicyId, Place])

    def take(self) -> Place:
        """One that nobody reads and nobody wants, a new one if there is none."""
        for place in self._all:
            if not place.is_wanted and not place.readers:
                place.is_wanted = True
                return place
        self._all.append(place := Place(len(self._all)))
        return place

    def hold(self, policy: PolicyId, place: Place) -> None:
        """The snapshot of ``policy`` lies there; an older one of it is let go."""
        self.release(policy)
        self._current[policy] = place

    def of(self, policy: PolicyId) -> Place | None:
        """Where the snapshot of ``policy`` lies; None once it was released."""
        return self._current.get(policy)

    def release(self, policy: PolicyId) -> None:
        """Nobody wants it any more; an unknown policy is no error."""
        place = self._current.pop(policy, None)
        if place is not None:
            place.is_wanted = False

    def ended(self, reader: Reader) -> None:
        """A dead engine reads nothing; nor does one that answered."""
        for place in self._all:
            place.readers.discard(reader)

    def clear(self) -> None:
        """Forget all."""
        self._all.clear()
        self._current.clear()
