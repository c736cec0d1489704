"""What a drill does to a run: kill, end, freeze or starve one of its processes, or arm a point."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.faults.plan import Kind
from runtime.faults.points import POINTS

How = Literal["signal", "freeze", "point"]

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


FIRST = (
    "guard.lease", "guard.epoch", "guard.announce", "guard.session", "session.open",
    "session.initial", "engine.start", "engine.spawn", "engine.state", "commit.mkdir",
    "commit.begin", "commit.rename", "commit.record", "commit.recorded", "ledger.segment",
    "chain.write", "chain.fsync", "chain.link", "chain.fsync_folder", "attempt.write",
    "view.replace", "publication.resume", "publication.record",
)  # fmt: skip
"""Points of a run's beginning: some of them are passed only there."""
LAST = (
    "producer.close", "session.leave", "session.settle", "session.outcome", "guard.end",
    "guard.finish", "export.mkdir", "export.rename", "evaluation.write", "evaluation.link",
)  # fmt: skip
"""Points of its end."""
_SELDOM = {
    "clock.time", "control.read", "engine.probe", "generation.wait", "generation.continue",
    "publication.drain", "publication.kill", "publication.rest", "publication.turn",
    "session.initial",
}  # fmt: skip
"""Passed only by runs of other kinds, or made for other faults than a kill."""
_PROVOKED = {
    "guard.lease": "session",
    "guard.epoch": "session",
    "guard.announce": "session",
    "guard.session": "session",
    "guard.end": "session",
    "guard.finish": "session",
    "session.open": "session",
    "engine.start": "engine server",
    "engine.spawn": "engine server",
    "engine.bury": "engine server",
    "engine.restart": "engine server",
    "engine.state": "engine server",
    "engine.end": "engine server",
    "attempt.write": "session",
    "attempt.replace": "session",
}
"""Points that a healthy run does not pass, and whose death leads there."""
_STEADY = tuple(p.name for p in POINTS if p.name not in {*_SELDOM, *LAST[:4]})
_FILE_KILLS = (
    "chain.write", "chain.fsync", "chain.link", "chain.fsync_folder", "chain.unlink",
    "commit.mkdir", "commit.fsync", "commit.rename", "commit.fsync_folder", "ledger.write",
    "ledger.fsync", "ledger.replace", "ledger.fsync_folder", "attempt.write", "attempt.replace",
    "view.write", "view.replace", "control.touch", "rollout.write",
)  # fmt: skip
_TORN = ("commit.save", "commit.fsync", "ledger.fsync", "chain.fsync", "view.replace")
_FULL = (
    "commit.mkdir", "commit.save", "commit.fsync", "ledger.write", "chain.write", "chain.link",
    "view.write", "rollout.write",
)  # fmt: skip
_SLOW = (
    "producer.take", "producer.group", "generation.request", "generation.answer", "session.train",
    "session.trained", "session.stage", "commit.begin", "commit.record", "commit.save",
    "publication.transfer", "publication.set_policy", "publication.resume", "gate.publication",
    "guard.watch", "engine.probe",
)  # fmt: skip
_HANGS = ("generation.request", "generation.answer", "producer.group", "group.generated")
_DROPS = ("generation.request", "generation.answer", "engine.probe", "control.read")

_OWNERS = ("guard", "session", "trainer rank", "raylet", "gcs")


def draw(dice: random.Random, name: str) -> Blow:
    """Draw the details of one kind of blow."""
    wait_s = dice.choice((dice.uniform(0.0, 1.0), dice.uniform(0.0, 4.0)))
    if name.startswith("kill ") and name != "kill at a point":
        role = name.removeprefix("kill ")
        ends = role in _OWNERS
        return Blow(name=name, how="signal", role=role, wait_s=wait_s, ends_epoch=ends)
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
        case "kill at a point":
            point = dice.choice((dice.choice(_STEADY), dice.choice(_FILE_KILLS)))
            return _armed(dice, name, point, Kind.KILL, wait_s)
        case "torn write":
            return _armed(dice, name, dice.choice(_TORN), Kind.TORN, wait_s)
        case "disk full":
            blow = _armed(dice, name, dice.choice(_FULL), Kind.DISK_FULL, wait_s)
            return blow
        case "slow":
            seconds = dice.uniform(0.3, 2.0)
            return _armed(dice, name, dice.choice(_SLOW), Kind.SLOW, wait_s, seconds)
        case "hang":
            return _armed(dice, name, dice.choice(_HANGS), Kind.HANG, wait_s, None)
        case "drop":
            return _armed(dice, name, dice.choice(_DROPS), Kind.DROP, wait_s)
        case "duplicate":
            return _armed(dice, name, "producer.land", Kind.DUPLICATE, wait_s)
        case "clock jump":
            seconds = dice.choice((-1, 1)) * dice.uniform(60.0, 86400.0)
            return _armed(dice, name, "clock.time", Kind.CLOCK_JUMP, wait_s, seconds)
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
        after=0 if point in _PROVOKED else after,
        provoke=_PROVOKED.get(point, ""),
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
    "slow": 4,
    "hang": 2,
    "drop": 4,
    "duplicate": 2,
    "clock jump": 3,
}
"""How often each comes, in a hundred or so."""


def deck(dice: random.Random, count: int, names: Sequence[str] = tuple(WEIGHTS)) -> list[str]:
    """So many blows in random order; from a few on, every kind is among them."""
    names = list(names)
    total = sum(WEIGHTS[name] for name in names)
    cards = [name for name in names for _ in range(WEIGHTS[name] * count // total)]
    while len(cards) < count:
        cards.append(dice.choices(names, [WEIGHTS[name] for name in names])[0])
    dice.shuffle(cards)
    return cards[:count]
