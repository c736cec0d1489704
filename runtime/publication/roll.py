"""Who takes part in a publication, and how far each one came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from runtime.engines.protocol import EngineInfo
from runtime.errors import WaitTimeout
from runtime.publication.decision import FailedEngine, Stage, VerifiedEngine
from runtime.publication.pausing import PausePlan
from runtime.publication.protocol import Target
from runtime.waits import Wait


@dataclass(slots=True)
class Participant:
    """One engine's way through the stages. ``failure`` is set at most once."""

    target: Target
    info: EngineInfo | None = None
    plan: PausePlan | None = None
    transfer_s: float = 0.0
    failure: FailedEngine | None = None

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"engine {self.target.slot} ({self.target.incarnation}) at {self.target.client.url}"

    def fail(self, stage: Stage, kind: str, error: str) -> None:
        """Take it out; the first reason stays."""
        if self.failure is None:
            self.failure = FailedEngine(
                slot=self.target.slot,
                incarnation=self.target.incarnation,
                stage=stage,
                kind=kind,
                error=error[:2000],
            )

    def verified(self) -> VerifiedEngine:
        """Describe it for the record."""
        plan = self.plan or PausePlan(pause="abort", flush=False)
        return VerifiedEngine(
            slot=self.target.slot,
            incarnation=self.target.incarnation,
            pause=plan.pause,
            flushed=plan.flush,
            transfer_s=self.transfer_s,
        )


class Roll:
    """All participants of one publication, by slot."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.all = [Participant(target) for target in sorted(targets, key=lambda t: t.slot)]

    @property
    def sound(self) -> list[Participant]:
        """Those that nothing went wrong with so far."""
        return [p for p in self.all if p.failure is None]

    @property
    def failed(self) -> list[Participant]:
        """Those that are out."""
        return [p for p in self.all if p.failure is not None]

    async def each(
        self,
        stage: Stage,
        limit_s: float,
        action: Callable[[Participant], Awaitable[None]],
        participants: Sequence[Participant] | None = None,
    ) -> list[tuple[Participant, str]]:
        """Do ``action`` for all sound participants (or the given ones) side by side.

        Whoever raises, or has not answered after ``limit_s`` together, is taken out with its
        reason. Never raises for a participant.

        Returns:
            The participants for which the action failed, with the reason.
        """
        members = self.sound if participants is None else list(participants)
        waiting = dict.fromkeys(p.name for p in members)
        failed: list[tuple[Participant, str]] = []

        async def one(participant: Participant) -> None:
            try:
                await action(participant)
            except Exception as exc:
                # The border of the transaction: whatever one engine's client raises, a broken
                # contract included, is the end of that engine and of no other.
                participant.fail(stage, type(exc).__name__, str(exc))
                failed.append((participant, str(exc)))
            waiting.pop(participant.name)

        try:
            async with (
                Wait(lambda: f"{stage} of {', '.join(waiting)}", limit_s),
                anyio.create_task_group() as tasks,
            ):
                for participant in members:
                    tasks.start_soon(one, participant)
        except WaitTimeout as exc:
            for participant in members:
                if participant.name in waiting:
                    participant.fail(stage, type(exc).__name__, exc.message)
                    failed.append((participant, exc.message))
        return failed
