"""One slot of the engines of a run: its states, its server, and how it looks from outside.

    starting -> stale -> healthy <-> suspect -> dead -> restarting -> stale
                                                  any of them but retired -> retired

A slot is *stale* while its server answers but holds no verified weights, so it gets no training
traffic: alive says nothing about weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from runtime.engines.protocol import EngineAddress, EngineClient, EngineInfo
from runtime.policy import PolicyId
from runtime.telemetry.events import Event


class SlotState(StrEnum):
    """Where one slot stands."""

    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    RETIRED = "retired"


_S = SlotState
TRANSITIONS: Mapping[SlotState, frozenset[SlotState]] = {
    _S.STARTING: frozenset({_S.STALE, _S.DEAD, _S.RETIRED}),
    _S.STALE: frozenset({_S.HEALTHY, _S.DEAD, _S.RETIRED}),
    _S.HEALTHY: frozenset({_S.SUSPECT, _S.DEAD, _S.RETIRED}),
    _S.SUSPECT: frozenset({_S.HEALTHY, _S.DEAD, _S.RETIRED}),
    _S.DEAD: frozenset({_S.RESTARTING, _S.RETIRED}),
    _S.RESTARTING: frozenset({_S.STALE, _S.DEAD, _S.RETIRED}),
    _S.RETIRED: frozenset(),
}
"""Every change a slot can make; anything else is a defect and raises."""

LIVE = frozenset({_S.STALE, _S.HEALTHY, _S.SUSPECT})
"""States with a server that answers, or did a moment ago."""


class SlotRunner(Protocol):
    """Starts and ends the server of one slot; the async face of ``EngineOwner``."""

    async def start(self) -> EngineAddress:
        """Start a new incarnation and wait until it answers.

        Raises:
            WaitTimeout: if it does not answer in time.
            EngineDead: if it ended while starting.
        """
        ...

    async def stop(self) -> None:
        """End the server and everything it started. Idempotent, bounded in time."""
        ...

    async def is_running(self) -> bool:
        """The server process (or thread) exists."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One engine as chosen for a call: this incarnation, holding this policy."""

    slot: int
    incarnation: str
    policy: PolicyId
    client: EngineClient
    takes_salt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot at one moment."""

    slot: int
    state: SlotState
    incarnation: str | None
    policy: PolicyId | None
    """Verified on it; None while nothing is."""
    active_samples: int
    since_s: float
    """Seconds in this state."""
    reason: str
    """Why it came into this state; empty where nothing is to be said."""


class Slot:
    """One slot as the pool keeps it; nobody else holds one."""

    __slots__ = (
        "active", "address", "client", "info", "policy", "reason", "rests", "route", "since",
        "slot", "state",
    )  # fmt: skip

    def __init__(self, slot: int, now: float) -> None:
        self.slot = slot
        self.state = SlotState.STARTING
        self.since = now
        self.reason = ""
        self.address: EngineAddress | None = None
        self.client: EngineClient | None = None
        self.info: EngineInfo | None = None
        self.policy: PolicyId | None = None
        self.route: Route | None = None
        self.active = 0
        self.rests = False

    @property
    def incarnation(self) -> str | None:
        """Of the present server; None while there is none."""
        return None if self.address is None else self.address.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngine:
    """One engine with a server, as publications and probes see it."""

    slot: int
    incarnation: str
    state: SlotState
    policy: PolicyId | None
    address: EngineAddress
    info: EngineInfo
    client: EngineClient


EVENTS: Mapping[tuple[SlotState, SlotState], Event] = {
    (_S.STARTING, _S.STALE): Event.ENGINE_STARTED,
    (_S.RESTARTING, _S.STALE): Event.ENGINE_RESTARTED,
    (_S.STALE, _S.HEALTHY): Event.ENGINE_VERIFIED,
    (_S.HEALTHY, _S.SUSPECT): Event.ENGINE_SUSPECTED,
    (_S.SUSPECT, _S.HEALTHY): Event.ENGINE_RECOVERED,
}
"""What is told of a change of state."""
FINAL_EVENTS: Mapping[SlotState, Event] = {
    _S.DEAD: Event.ENGINE_DIED,
    _S.RETIRED: Event.ENGINE_RETIRED,
}
"""What is told of these, whatever the state before."""
