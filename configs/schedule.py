"""When a run commits, evaluates and ends. Boundaries lie between collections; cadences round up."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from configs.run import RunSpec

_SHOWN = 100


class Schedule(BaseModel):
    """Boundaries of an undisturbed run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    updates: int | None
    """Update at which the run is complete; None where only the data's epochs end it."""
    collections: int | None
    commits: list[int]
    """Updates with a commit, 0 first; the first 100."""
    num_commits: int | None
    evaluations: list[int]
    """Updates with an evaluation; the first 100. The final one comes at the actual last update."""
    num_evaluations: int | None
    export: bool
    """An HF export follows the last commit."""
    closing: dict[str, float]
    """Seconds to leave after `core.max_run_seconds`, by part."""


def last_update(spec: RunSpec) -> int | None:
    """`core.max_updates`, rounded up to whole collections; None without it."""
    if spec.core.max_updates is None:
        return None
    per_collection = spec.core.updates_per_collection
    return -(-spec.core.max_updates // per_collection) * per_collection


def is_due(every: int, update: int, updates_per_collection: int) -> bool:
    """A cadence of ``every`` updates falls into the collection that ends at ``update``."""
    return update // every > (update - updates_per_collection) // every


def evaluation_due(spec: RunSpec, update: int) -> bool:
    """The boundary at ``update`` evaluates by cadence."""
    every = spec.evaluation.every_updates
    return every is not None and is_due(every, update, spec.core.updates_per_collection)


def commit_due(spec: RunSpec, update: int) -> bool:
    """The boundary at ``update`` commits: by cadence, for its evaluation, or as the last one."""
    by_cadence = is_due(spec.checkpoint.every_updates, update, spec.core.updates_per_collection)
    return by_cadence or evaluation_due(spec, update) or update == last_update(spec)


def make_schedule(spec: RunSpec) -> Schedule:
    """All boundaries, where the end is known from the run file alone."""
    last = last_update(spec)
    per_collection = spec.core.updates_per_collection
    evaluated = _boundaries(spec.evaluation.every_updates, last, per_collection)
    committed = _boundaries(spec.checkpoint.every_updates, last, per_collection) | evaluated | {0}
    if last is not None:
        committed.add(last)
        if spec.evaluation.final and spec.evaluation.sets:
            evaluated.add(last)
    commits, evaluations = sorted(committed), sorted(evaluated)
    return Schedule(
        updates=last,
        collections=None if last is None else last // per_collection,
        commits=commits[:_SHOWN],
        num_commits=None if last is None else len(commits),
        evaluations=evaluations[:_SHOWN],
        num_evaluations=None if last is None else len(evaluations),
        export=spec.output.export_hf,
        closing=closing_seconds(spec),
    )


def _boundaries(every: int | None, last: int | None, per_collection: int) -> set[int]:
    if every is None or last is None:
        return set()
    return {-(-due // per_collection) * per_collection for due in range(every, last + 1, every)}


def closing_seconds(spec: RunSpec) -> dict[str, float]:
    """Room a scheduler must leave after the wall-clock bound, which is soft.

    A collection under way may take as long as its slowest response, and a commit as long as a
    trainer collective may wait; export and teardown are judged by experience.
    """
    parts = {
        "collection": spec.rollout.running_deadline,
        "commit": spec.core.distributed_timeout,
        "export": 300.0 if spec.output.export_hf else 0.0,
        "teardown": 120.0,
    }
    if spec.evaluation.final and spec.evaluation.sets and spec.evaluation.mode == "shared":
        parts["evaluation"] = spec.evaluation.deadline
    return parts


def closing_warning(spec: RunSpec) -> str | None:
    """`launch.timeout` ends the job before it could finish by itself."""
    bound, timeout = spec.core.max_run_seconds, spec.launch.timeout
    if bound is None or timeout == 0:
        return None
    parts = {name: seconds for name, seconds in closing_seconds(spec).items() if seconds}
    needed = bound + sum(parts.values())
    if timeout >= needed:
        return None
    terms = " + ".join(f"{name} {seconds:g}" for name, seconds in parts.items())
    return (
        f"launch.timeout {timeout:g} s leaves no room after core.max_run_seconds: "
        f"{bound:g} + {terms} = {needed:g} s"
    )
