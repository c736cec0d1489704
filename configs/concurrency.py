"""How many samples are in flight, and how stale that makes what the trainer gets."""

from __future__ import annotations

from dataclasses import dataclass

from configs.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Samples in flight, settled."""

    samples: int
    """In whole groups, within the staleness bound."""
    reason: str
    automatic: int
    """What it would be were it not set."""
    bound_groups: int
    """Groups admitted and not yet consumed, those in training included, never exceed this."""
    staleness_generating: int
    """Updates of staleness to expect where the trainer waits for generation."""
    staleness_training: int
    """Updates of staleness to expect where finished groups wait for the trainer."""
    warnings: tuple[str, ...]


def staleness_bound_groups(spec: RunSpec) -> int:
    """Most groups admitted and not yet consumed: collections that fit `max_staleness`, plus one."""
    ahead = spec.async_.max_staleness // spec.core.updates_per_collection
    return spec.rollout.groups_per_collection * (ahead + 1)


def settle_concurrency(spec: RunSpec, *, slots: int | None = None) -> Concurrency:
    """Samples in flight by the run file, or by rule where it is silent.

    Args:
        spec: the run file.
        slots: serving slots of all engines as they turned out; None: as the file has them.

    Returns:
        The settled number. The rule: the larger of a whole collection and twice the serving slots,
        rounded up to whole groups, but no more than the staleness bound allows. Twice, so that a
        slot that falls free finds work waiting at the engine; more queued work adds no serving
        capacity.
    """
    per_group = spec.rollout.samples_per_prompt
    collection = spec.rollout.groups_per_collection * per_group
    if slots is None:
        slots = spec.rollout.engines * spec.rollout.max_running_requests
    bound_groups = staleness_bound_groups(spec)
    bound = bound_groups * per_group
    wanted = max(collection, -(-2 * slots // per_group) * per_group)
    automatic = min(wanted, bound)
    explicit = spec.async_.async_max_concurrent_samples
    if explicit is None:
        samples = automatic
        reason = f"larger of a collection ({collection}) and twice the serving slots (2 x {slots})"
        if automatic < wanted:
            reason += f", held by the staleness bound ({bound_groups} groups x {per_group})"
    else:
        samples = min(explicit // per_group * per_group, bound)
        reason = f"set to {explicit}; by rule it would be {automatic}"
    stale = _staleness(spec, samples // per_group)
    return Concurrency(
        samples=samples,
        reason=reason,
        automatic=automatic,
        bound_groups=bound_groups,
        staleness_generating=stale[0],
        staleness_training=stale[1],
        warnings=tuple(_warnings(explicit, samples, automatic, bound)),
    )


def _staleness(spec: RunSpec, groups: int) -> tuple[int, int]:
    """Expected staleness in updates: (trainer waits, finished groups wait).

    Little's law: a group stays as many collections as there are groups ahead of it, counted in
    collections. Where the trainer waits these are the groups in flight; where it does not, a full
    buffer comes on top. Never above the multiple of `updates_per_collection` that `max_staleness`
    allows.
    """
    per_collection = spec.core.updates_per_collection
    most = spec.async_.max_staleness // per_collection
    in_flight = -(-groups // spec.rollout.groups_per_collection)
    return (
        min(most, in_flight) * per_collection,
        min(most, in_flight + spec.async_.buffer_collections) * per_collection,
    )


def _warnings(explicit: int | None, samples: int, automatic: int, bound: int) -> list[str]:
    warnings: list[str] = []
    name = "async.async_max_concurrent_samples"
    if explicit is None:
        return warnings
    if explicit > automatic:
        warnings.append(
            f"{name} {explicit} is above the automatic {automatic}: more queued work adds no "
            "serving capacity; look at trainer wait and serving occupancy"
        )
    if samples < min(explicit, bound):
        warnings.append(f"{name} {explicit} rounds down to {samples}, whole groups")
    if explicit > bound:
        warnings.append(f"{name} {explicit} is held at {bound} by async.max_staleness")
    return warnings
