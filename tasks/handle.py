"""What a flow holds of a run: where it is, and which boundaries it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.load import LoadedRun
from configs.plan import Plan
from configs.schedule import commit_due, evaluation_due
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.session.steps import Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The updates between two commits, and what their boundary brings."""

    after: int
    """The boundary before; committed."""
    update: int
    """The boundary it reaches."""
    first_collection: int
    last_collection: int
    evaluations: tuple[str, ...]
    """Sets that are evaluated at this boundary."""

    @property
    def num_collections(self) -> int:
        """Collections it trains on."""
        return self.last_collection - self.first_collection + 1

    @property
    def title(self) -> str:
        """``collections 41-60``."""
        return f"collections {self.first_collection}-{self.last_collection}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """One run, as every task of a flow gets it."""

    loaded: LoadedRun
    plan: Plan
    attempt: int
    """The attempt that ran when the flow attached."""
    seen_from: int
    """What was committed then: earlier steps are history that this flow does not show."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.loaded.spec.name

    @property
    def root(self) -> RunRoot:
        """Its output root."""
        return RunRoot.of(self.loaded.spec.output.root)

    @property
    def key(self) -> str:
        """The name in the letters that artifact keys allow."""
        return "".join(c if c.isalnum() else "-" for c in self.name.lower())

    @property
    def has_background_evaluation(self) -> bool:
        """Evaluations are deployment runs of their own: nothing here waits for their results."""
        evaluation = self.loaded.spec.evaluation
        return evaluation.mode == "background" and bool(evaluation.sets)

    @property
    def last_update(self) -> int:
        """The update an undisturbed run ends with."""
        updates = self.plan.schedule.updates
        return 10**9 if updates is None else updates

    def committed(self) -> int:
        """Newest committed update of history, 0 before there is one."""
        return max(0, history.committed_update(Chain(self.root).read()))

    def end_update(self) -> int | None:
        """The update a complete run ended with; None while it is not complete."""
        end = history.current_end(Chain(self.root).read())
        return end.update if end is not None and end.state == "complete" else None

    def stretches(self) -> Iterator[Stretch]:
        """What is left when the flow attaches, boundary by boundary.

        The chain is asked after each, so a rewind needs no handling of its own: the next stretch
        begins where history stands. A session that runs ahead of the flow makes it skip nothing.
        """
        at = self.seen_from
        while at < self.last_update:
            end = self.end_update()
            if end is not None and at >= end:
                return
            stretch = self._stretch(at)
            yield stretch
            at = min(stretch.update, self.committed())

    def _stretch(self, after: int) -> Stretch:
        spec = self.loaded.spec
        per_collection = spec.core.updates_per_collection
        update = after + per_collection
        while update < self.last_update and not commit_due(spec, update):
            update += per_collection
        due = evaluation_due(spec, update) or (update == self.last_update and spec.evaluation.final)
        return Stretch(
            after=after,
            update=update,
            first_collection=after // per_collection + 1,
            last_collection=update // per_collection,
            evaluations=tuple(spec.evaluation.sets) if due else (),
        )

    def final_export(self) -> Step:
        """The export of the last update: the actual one where the run has ended already."""
        update = self.end_update()
        last = self.committed() if update is None else update
        return Step(kind=StepKind.EXPORT, update=last, after=last)

    def step(
        self, kind: StepKind, stretch: Stretch | None = None, *, set_name: str | None = None
    ) -> Step:
        """The committed step a task ensures."""
        if stretch is None:
            return Step(kind=kind, after=self.committed() if kind is StepKind.FINISH else 0)
        after = stretch.update if kind is StepKind.EVALUATION else stretch.after
        return Step(kind=kind, update=stretch.update, set_name=set_name, after=after)

    def report(self) -> Path:
        """Where the report lies."""
        return self.root.reports / "report.html"
