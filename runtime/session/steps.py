"""The steps of a run: committed things, so that a rewind cannot contradict a finished one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class StepKind(StrEnum):
    """What a step is about."""

    PREPARE = "prepare"
    RENDEZVOUS = "rendezvous"
    SEGMENT = "segment"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    EXPORT = "export"
    CACHE = "cache"
    FINISH = "finish"


_AT_UPDATE = (StepKind.SEGMENT, StepKind.CHECKPOINT, StepKind.EVALUATION, StepKind.EXPORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, written ``segment/50`` or ``evaluation/50/held-out``."""

    kind: StepKind
    update: int | None = None
    """The update it reaches or belongs to; None where it belongs to none."""
    set_name: str | None = None
    """The evaluation set."""
    after: int = 0
    """The boundary before it: whoever asks for this step has seen that one committed."""

    def __post_init__(self) -> None:
        if (self.update is not None) != (self.kind in _AT_UPDATE):
            raise ValueError(f"a {self.kind} step and update {self.update} do not go together")
        if (self.set_name is not None) != (self.kind is StepKind.EVALUATION):
            raise ValueError(f"a {self.kind} step and set {self.set_name!r} do not go together")

    def __str__(self) -> str:
        parts = (self.kind.value, self.update, self.set_name)
        return "/".join(str(part) for part in parts if part is not None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``evaluation/50/held-out``; ``after`` is not part of the text.

        Raises:
            ValueError: if it is anything else.
        """
        kind, _, rest = text.partition("/")
        update, _, set_name = rest.partition("/")
        if update and not update.isdecimal():
            raise ValueError(f"not a step: {text!r} (expected <kind>[/<update>[/<set>]])")
        return cls(
            kind=StepKind(kind),
            update=int(update) if update else None,
            set_name=set_name or None,
        )


def boundaries(every: int, *, updates: int, updates_per_collection: int = 1) -> list[int]:
    """The updates at which a cadence is due: multiples of it, rounded up to whole collections.

    Args:
        every: the cadence in updates, >= 1.
        updates: the last update of the run; nothing is due beyond it.
        updates_per_collection: boundaries lie between collections.
    """
    step = updates_per_collection
    due = {-(-u // step) * step for u in range(every, updates + 1, every)}
    return sorted(u for u in due if u <= updates)


def plan_steps(
    *,
    updates: int,
    checkpoint_every: int,
    updates_per_collection: int = 1,
    evaluation_every: int | None = None,
    evaluation_sets: Sequence[str] = (),
    evaluates_final: bool = False,
    exports_final: bool = False,
) -> tuple[Step, ...]:
    """All steps of a run in order, from its cadences.

    A run that ends earlier than planned answers the steps beyond its end as done (see ``ensure``).
    Commits by time are not steps: they come when they come.

    Args:
        updates: the last update as planned.
        checkpoint_every: updates between commits, >= 1.
        updates_per_collection: boundaries lie between collections.
        evaluation_every: updates between evaluations; None for none.
        evaluation_sets: names of the sets, in order.
        evaluates_final: evaluate the last update, on or off cadence.
        exports_final: export the last update.
    """
    at = {"updates": updates, "updates_per_collection": updates_per_collection}
    commits = boundaries(checkpoint_every, **at)
    evaluated = set(boundaries(evaluation_every, **at)) if evaluation_every else set[int]()
    if evaluates_final:
        evaluated.add(updates)
    steps = [Step(kind=StepKind.PREPARE), Step(kind=StepKind.RENDEZVOUS)]
    before = 0
    for update in sorted({*commits, *(evaluated if evaluation_sets else ()), updates}):
        steps.append(Step(kind=StepKind.SEGMENT, update=update, after=before))
        steps.append(Step(kind=StepKind.CHECKPOINT, update=update, after=before))
        if update in evaluated:
            steps += [
                Step(kind=StepKind.EVALUATION, update=update, set_name=name, after=update)
                for name in evaluation_sets
            ]
        before = update
    if exports_final:
        steps.append(Step(kind=StepKind.EXPORT, update=updates, after=before))
    steps.append(Step(kind=StepKind.CACHE, after=before))
    steps.append(Step(kind=StepKind.FINISH, after=before))
    return tuple(steps)
