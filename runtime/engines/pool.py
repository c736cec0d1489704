"""Which of a run's engine slots may be given work.

Whoever reports about a server names its incarnation; a report about an earlier one is late, returns
False and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from runtime import faults
from runtime.clock import Clock
from runtime.engines.protocol import EngineAddress, EngineClient, EngineInfo
from runtime.engines.slots import (
    EVENTS,
    FINAL_EVENTS,
    LIVE,
    TRANSITIONS,
    LiveEngine,
    Route,
    Slot,
    SlotState,
    SlotView,
)
from runtime.errors import ContractViolation, UnavailableError
from runtime.policy import PolicyId
from runtime.telemetry.events import Event

Listener = Callable[[Event, Mapping[str, object]], None]
"""Called on the event loop with an event and its fields; must not block or raise."""


class EnginePool:
    """States, routing and load of all slots. Sync; used from one event loop.

    Args:
        num_slots: engines of the run file; slots are numbered from 0.
        clock: for the time in a state.
    """

    def __init__(self, num_slots: int, *, clock: Clock) -> None:
        self._clock = clock
        self._slots = [Slot(i, clock.monotonic()) for i in range(num_slots)]
        self._served: tuple[PolicyId, ...] = ()
        self._listeners: list[Listener] = []
        self._leaving: list[EngineClient] = []

    # --- What is published --------------------------------------------------------------------

    def serve(self, policy: PolicyId, *, also: PolicyId | None = None) -> None:
        """Send training traffic to engines verified at ``policy``.

        Args:
            policy: the published policy.
            also: the one before it, during a ``rolling`` publication; engines still at it keep
                getting traffic until their turn.
        """
        self._served = (policy,) if also is None else (policy, also)

    @property
    def published(self) -> PolicyId | None:
        """The published policy; None before the first publication."""
        return self._served[0] if self._served else None

    # --- Life of an incarnation -----------------------------------------------------------------

    def joined(self, address: EngineAddress, info: EngineInfo, client: EngineClient) -> None:
        """A new incarnation answers: the slot is stale until a publication verified it."""
        slot = self._slots[address.slot]
        self._allow(slot, SlotState.STALE, "")
        slot.address, slot.info, slot.client = address, info, client
        slot.policy, slot.route, slot.active = None, None, 0
        self._move(slot, SlotState.STALE, "")

    def mark_verified(self, slot: int, incarnation: str, policy: PolicyId) -> bool:
        """The engine holds exactly the weights of ``policy``. False for an earlier incarnation.

        A suspect engine stays suspect; only a probe clears it.
        """
        found = self._present(slot, incarnation)
        if found is None or found.client is None or found.info is None:
            return False
        found.policy = policy
        found.route = Route(
            slot=slot,
            incarnation=incarnation,
            policy=policy,
            client=found.client,
            takes_salt=found.info.takes_salt,
        )
        if found.state is SlotState.STALE:
            self._move(found, SlotState.HEALTHY, "")
        else:
            self._tell(Event.ENGINE_VERIFIED, found, "")
        return True

    def mark_suspect(self, slot: int, incarnation: str, reason: str) -> bool:
        """A probe failed: new work goes elsewhere while there is a healthy engine."""
        return self._report(slot, incarnation, SlotState.SUSPECT, {SlotState.HEALTHY}, reason)

    def mark_recovered(self, slot: int, incarnation: str) -> bool:
        """A probe of a suspect engine succeeded."""
        return self._report(slot, incarnation, SlotState.HEALTHY, {SlotState.SUSPECT}, "")

    def mark_dead(self, slot: int, incarnation: str, reason: str) -> bool:
        """This incarnation never serves again. Whoever says so also ends its process.

        Listeners hear ``ENGINE_DIED`` before this returns, so its requests are given up first.
        """
        found = self._present(slot, incarnation)
        if found is None:
            return False
        self._die(found, reason)
        return True

    def start_failed(self, slot: int, reason: str) -> None:
        """A start or restart came to nothing; there is no incarnation to name."""
        self._die(self._slots[slot], reason)

    def restarting(self, slot: int) -> None:
        """A dead slot is being started again."""
        self._move(self._slots[slot], SlotState.RESTARTING, "")

    def retire(self, slot: int, reason: str) -> None:
        """The slot is given up for good. Idempotent."""
        found = self._slots[slot]
        if found.state is not SlotState.RETIRED:
            self._move(found, SlotState.RETIRED, reason)
            self._let_go(found)

    def rest(self, slot: int, incarnation: str) -> bool:
        """Send an engine no new work until ``end_rests``, if another one can take it.

        Returns:
            Whether it rests; False when it is the last that serves.
        """
        found = self._present(slot, incarnation)
        if found is None:
            return True
        found.rests = True
        if not self.is_available:
            found.rests = False
        return found.rests

    def end_rests(self) -> None:
        """Every engine may be given work again."""
        for slot in self._slots:
            slot.rests = False

    # --- Routing ------------------------------------------------------------------------------

    def choose(self, prefer: Route | None = None) -> Route:
        """Pick the engine for a call.

        Args:
            prefer: where the group's calls went so far; that engine is taken again, for its prefix
                cache, while the incarnation is healthy and verified at a served policy.

        Returns:
            The healthy engine with the fewest active samples among those verified at a served
            policy, newest policy first; a suspect one only when no healthy one is there.

        Raises:
            UnavailableError: if there is none.
        """
        if prefer is not None:
            slot = self._slots[prefer.slot]
            is_same = slot.route is not None and slot.route.incarnation == prefer.incarnation
            is_open = slot.state is SlotState.HEALTHY and not slot.rests
            if is_same and is_open and slot.policy in self._served:
                return cast(Route, slot.route)
        for state in (SlotState.HEALTHY, SlotState.SUSPECT):
            for policy in self._served:
                best: Slot | None = None
                for slot in self._slots:
                    if slot.state is state and slot.policy == policy and not slot.rests:
                        best = slot if best is None or slot.active < best.active else best
                if best is not None and best.route is not None:
                    return best.route
        raise UnavailableError(
            f"no engine is verified at the published policy {self.published}: "
            + ", ".join(f"{s.slot} {s.state} at {s.policy}" for s in self._slots),
            policy=str(self.published),
        )

    @property
    def is_available(self) -> bool:
        """``choose`` would find an engine now."""
        ready = (SlotState.HEALTHY, SlotState.SUSPECT)
        return any(
            s.state in ready and s.policy in self._served and not s.rests for s in self._slots
        )

    def enter(self, route: Route, num_samples: int) -> None:
        """A call with so many samples goes to this engine; ``leave`` must follow."""
        if self._slots[route.slot].incarnation == route.incarnation:
            self._slots[route.slot].active += num_samples

    def leave(self, route: Route, num_samples: int) -> None:
        """The call ended, whatever came of it."""
        if self._slots[route.slot].incarnation == route.incarnation:
            self._slots[route.slot].active -= num_samples

    # --- Looking --------------------------------------------------------------------------------

    def live(self) -> list[LiveEngine]:
        """All engines with a server, stale ones too: the targets of a publication."""
        return [
            LiveEngine(
                slot=s.slot, incarnation=s.address.incarnation, state=s.state, policy=s.policy,
                address=s.address, info=s.info, client=s.client,
            )
            for s in self._slots
            if s.state in LIVE and s.address and s.info and s.client
        ]  # fmt: skip

    def views(self) -> list[SlotView]:
        """Every slot, in order."""
        now = self._clock.monotonic()
        return [
            SlotView(
                slot=s.slot, state=s.state, incarnation=s.incarnation, policy=s.policy,
                active_samples=s.active, since_s=now - s.since, reason=s.reason,
            )
            for s in self._slots
        ]  # fmt: skip

    def state(self, slot: int) -> SlotState:
        """State of one slot."""
        return self._slots[slot].state

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of starts, verifications, suspicions, deaths and retirements."""
        self._listeners.append(listener)

    async def close_left(self) -> None:
        """Close the clients of incarnations that are gone."""
        leaving, self._leaving = self._leaving, []
        for client in leaving:
            await client.close()

    async def close(self) -> None:
        """Retire every slot and close every client. Idempotent."""
        for slot in self._slots:
            self.retire(slot.slot, "closed")
        await self.close_left()

    # --- Inside -------------------------------------------------------------------------------

    def _present(self, slot: int, incarnation: str) -> Slot | None:
        found = self._slots[slot]
        is_it = found.state in LIVE and found.incarnation == incarnation
        return found if is_it else None

    def _report(
        self, slot: int, incarnation: str, state: SlotState, at: set[SlotState], reason: str
    ) -> bool:
        found = self._present(slot, incarnation)
        if found is None or found.state not in at:
            return False
        self._move(found, state, reason)
        return True

    def _die(self, slot: Slot, reason: str) -> None:
        # Told with the incarnation that died, then forgotten.
        self._move(slot, SlotState.DEAD, reason)
        self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        if slot.client is not None:
            self._leaving.append(slot.client)
        slot.client = slot.address = slot.info = slot.policy = slot.route = None
        slot.active, slot.rests = 0, False

    def _move(self, slot: Slot, state: SlotState, reason: str) -> None:
        if faults.plan is not None:
            faults.plan.reach("engine.state")
        self._allow(slot, state, reason)
        before, slot.state, slot.reason = slot.state, state, reason
        slot.since = self._clock.monotonic()
        event = EVENTS.get((before, state), FINAL_EVENTS.get(state))
        if event is not None:
            self._tell(event, slot, reason)

    def _allow(self, slot: Slot, state: SlotState, reason: str) -> None:
        if state not in TRANSITIONS[slot.state]:
            raise ContractViolation(
                f"engine slot {slot.slot} cannot go from {slot.state} to {state} ({reason})",
                slot=slot.slot,
            )

    def _tell(self, event: Event, slot: Slot, reason: str) -> None:
        fields: Mapping[str, object] = {
            "slot": slot.slot,
            "incarnation": slot.incarnation,
            "policy": None if slot.policy is None else str(slot.policy),
            "reason": reason,
        }
        for listener in self._listeners:
            listener(event, fields)
