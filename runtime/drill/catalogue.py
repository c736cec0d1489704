"""What a drill does to a run: kill, end, freeze or starve one of its processes, or arm a point."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.drill.places import (
    DROPS,
    FILE_KILLS,
    FULL,
    HANGS,
    POINTS_OF,
    PROVOKED,
    SLOW,
    STEADY,
    TORN,
)
from runtime.faults.plan import Kind

_AT = " at "
_ANY = " at a point"

How = Literal["signal", "freeze", "point", "two flows", "rewind"]

ROLES = (
    "flow",
    "guard",
    "session",
    "trainer rank",
    "engine server",
    "engine actor",
    "raylet",
    "gcs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One thing that is done to a run, drawn before it is done."""

    name: str
    """Row of the table: ``kill guard``, ``kill at a point``."""
    how: How
    """``two flows`` and ``rewind`` are stories of several steps, see ``dealing``."""
    role: str = ""
    """Whose process a signal or a freeze meets; ``owner`` is every process of the run."""
    signal: Literal["kill", "term"] = "kill"
    point: str = ""
    kind: Kind = Kind.KILL
    after: int = 0
    times: int = 1
    seconds: float | None = None
    provoke: str = ""
    """Whose SIGKILL leads to the point; empty where a healthy run passes it."""
    wait_s: float = 0.0
    """From the run's last recovery to this blow."""
    ends_epoch: bool = field(default=False)
    """The owner goes with it; otherwise the run is expected to go on in the same epoch."""

    @property
    def text(self) -> str:
        """What it is, with its point: the card that would have it again."""
        if not self.point:
            return self.name
        return f"{self.name.removesuffix(_ANY)}{_AT}{self.point}"


_OWNERS = ("guard", "session", "trainer rank", "raylet", "gcs")


def parse(card: str) -> tuple[str, str]:
    """The blow that a card names, and its point where it names one.

    A card is a name of ``WEIGHTS``, or says where: ``drop at generation.answer``, and
    ``kill at commit.record`` of a ``kill at a point``.

    Raises:
        ValueError: if no blow is called so, or it cannot fall there.
    """
    if card in WEIGHTS:
        return card, ""
    name, _, point = card.rpartition(_AT)
    name = f"kill{_ANY}" if name == "kill" else name
    if point not in POINTS_OF.get(name, ()):
        raise ValueError(f"no blow is called {card!r}")
    return name, point


def draw(dice: random.Random, card: str) -> Blow:
    """Draw the details of one kind of blow."""
    wait_s = dice.choice((dice.uniform(0.0, 1.0), dice.uniform(0.0, 4.0)))
    name, named = parse(card)
    if name.startswith("kill ") and name not in POINTS_OF:
        role = name.removeprefix("kill ")
        ends = role in _OWNERS
        return Blow(name=name, how="signal", role=role, wait_s=wait_s, ends_epoch=ends)

    def armed(kind: Kind, points: Sequence[str], seconds: float | None = None) -> Blow:
        return _armed(dice, name, named or dice.choice(points), kind, wait_s, seconds)

    match name:
        case "terminate guard":
            return Blow(
                name=name, how="signal", role="guard", signal="term", wait_s=wait_s, ends_epoch=True
            )
        case "freeze guard":
            return Blow(name=name, how="freeze", role="guard", wait_s=wait_s, ends_epoch=True)
        case "freeze owner":
            return Blow(name=name, how="freeze", role="owner", wait_s=wait_s, ends_epoch=True)
        case "freeze engine":
            return Blow(name=name, how="freeze", role="engine server", wait_s=wait_s)
        case "two flows":
            role = dice.choice(("guard", "session"))
            point = named or dice.choice(POINTS_OF[name])
            return Blow(
                name=name,
                how="two flows",
                role=role,
                point=point,
                # Both with their claim in hand; or one while the other makes its own.
                times=2 if point == "attempt.link" else 1,
                wait_s=wait_s,
                ends_epoch=True,
            )
        case "rewind":
            return Blow(name=name, how="rewind", role="session", wait_s=wait_s, ends_epoch=True)
        case "kill at a point":
            return armed(Kind.KILL, (dice.choice(STEADY), dice.choice(FILE_KILLS)))
        case "torn write":
            return armed(Kind.TORN, TORN)
        case "disk full":
            return armed(Kind.DISK_FULL, FULL)
        case "slow":
            return armed(Kind.SLOW, SLOW, dice.uniform(0.3, 2.0))
        case "hang":
            return armed(Kind.HANG, HANGS)
        case "drop":
            return armed(Kind.DROP, DROPS)
        case "duplicate":
            return armed(Kind.DUPLICATE, POINTS_OF[name])
        case "clock jump":
            seconds = dice.choice((-1, 1)) * dice.uniform(60.0, 86400.0)
            return armed(Kind.CLOCK_JUMP, POINTS_OF[name], seconds)
        case _:
            raise ValueError(f"no blow is called {name!r}")


def at_point(name: str, point: str) -> Blow:
    """A kill at a point that the run is about to pass."""
    return Blow(name=name, how="point", point=point, ends_epoch=True)


def _armed(
    dice: random.Random,
    name: str,
    point: str,
    kind: Kind,
    wait_s: float,
    seconds: float | None = None,
) -> Blow:
    ends = kind in (Kind.KILL, Kind.TORN)
    after = dice.choice((0, 0, 1, 2, 5))
    return Blow(
        name=name,
        how="point",
        point=point,
        kind=kind,
        after=0 if point in PROVOKED else after,
        provoke=PROVOKED.get(point, ""),
        seconds=seconds,
        wait_s=wait_s,
        ends_epoch=ends,
    )


WEIGHTS: dict[str, int] = {
    "kill at a point": 26,
    "torn write": 6,
    "disk full": 8,
    "kill flow": 6,
    "kill guard": 5,
    "kill session": 5,
    "kill trainer rank": 5,
    "kill engine server": 6,
    "kill engine actor": 4,
    "kill raylet": 3,
    "kill gcs": 3,
    "terminate guard": 4,
    "freeze guard": 2,
    "freeze owner": 2,
    "freeze engine": 3,
    "two flows": 4,
    "rewind": 4,
    "slow": 4,
    "hang": 2,
    "drop": 4,
    "duplicate": 2,
    "clock jump": 3,
}
"""How often each comes, in a hundred or so."""


def deck(dice: random.Random, count: int, names: Sequence[str] = tuple(WEIGHTS)) -> list[str]:
    """So many blows in random order; from a few on, every kind is among them."""
    weights = {name: WEIGHTS[parse(name)[0]] for name in names}
    total = sum(weights.values())
    cards = [name for name, weight in weights.items() for _ in range(weight * count // total)]
    while len(cards) < count:
        cards.append(dice.choices([*weights], [*weights.values()])[0])
    dice.shuffle(cards)
    return cards[:count]
