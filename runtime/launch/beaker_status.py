"""What became of a Beaker experiment, from the jobs its API describes.

Reads the package's own messages by their fields; a cancel code decides before an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from runtime.launch.standing import AttemptClass, AttemptStanding, RankStanding, of_ranks

_SUBMITTED, _QUEUED, _INITIALIZING, _RUNNING, _STOPPING, _UPLOADING = 1, 2, 3, 4, 5, 6
_CANCELED, _SUCCEEDED, _FAILED, _READY = 7, 8, 9, 10
_STATUS_NAMES = {
    _SUBMITTED: "submitted",
    _QUEUED: "queued",
    _INITIALIZING: "initializing",
    _RUNNING: "running",
    _STOPPING: "stopping",
    _UPLOADING: "uploading_results",
    _CANCELED: "canceled",
    _SUCCEEDED: "succeeded",
    _FAILED: "failed",
    _READY: "ready_to_start",
}
_LIVE = {
    _SUBMITTED: AttemptClass.PENDING,
    _QUEUED: AttemptClass.PENDING,
    _INITIALIZING: AttemptClass.STARTING,
    _READY: AttemptClass.STARTING,
    _RUNNING: AttemptClass.RUNNING,
    _STOPPING: AttemptClass.RUNNING,
    _UPLOADING: AttemptClass.RUNNING,
}

CODES: dict[int, tuple[str, AttemptClass]] = {
    1: ("system_preemption", AttemptClass.PREEMPTED),
    2: ("user_preemption", AttemptClass.PREEMPTED),
    3: ("idle", AttemptClass.CANCELED),
    4: ("manual", AttemptClass.CANCELED),
    5: ("timeout", AttemptClass.FAILED),
    6: ("node_unavailable", AttemptClass.INTERRUPTED),
    7: ("impossible_to_schedule", AttemptClass.FAILED),
    8: ("sibling_task_failed", AttemptClass.INTERRUPTED),
    9: ("sibling_task_preemption", AttemptClass.INTERRUPTED),
    10: ("healthcheck_failed", AttemptClass.INTERRUPTED),
    11: ("sibling_task_retry", AttemptClass.INTERRUPTED),
    12: ("node_unhealthy", AttemptClass.INTERRUPTED),
}
"""By number: the package's own enumeration lacks the last one, which its messages carry."""
_UNSCHEDULABLE = 7
_SIBLINGS = (8, 9)
_REASONS = {5: "time limit of the job", 7: "impossible to schedule"}


def standing_of(jobs: Iterable[Any]) -> AttemptStanding:
    """The class of an experiment from all jobs of all its tasks.

    Args:
        jobs: ``beaker_pb2.Job`` messages, in any order; retried replicas included.
    """
    newest = newest_per_rank(jobs)
    if not newest:
        return AttemptStanding(
            kind=AttemptClass.PENDING, raw="created", reason="it has no jobs yet"
        )
    ranks = _name_siblings([_rank(rank, job) for rank, job in newest.items()])
    standing = of_ranks(ranks, _oddities(newest))
    running = [job for job in newest.values() if job.status.status == _RUNNING]
    assigned = [job.assignment_details.resource_assignment for job in running]
    return replace(
        standing,
        active_gpus=sum(len(each.gpus) for each in assigned) if running else None,
        allocated_gpus=sum(each.assigned_slots_count for each in assigned) if running else None,
    )


def newest_per_rank(jobs: Iterable[Any]) -> dict[int, Any]:
    """The newest job of each rank by creation time; a job without a group is rank 0."""
    newest: dict[int, Any] = {}
    for job in jobs:
        rank = _group(job).rank
        if rank not in newest or _created(newest[rank]) <= _created(job):
            newest[rank] = job
    return dict(sorted(newest.items()))


def _rank(rank: int, job: Any) -> RankStanding:
    kind, raw, reason, code = _classify(job.status)
    # One that was ended because of a sibling may have left with a word of its own before.
    is_told = kind is AttemptClass.FAILED or (kind.is_over and code in _SIBLINGS)
    return RankStanding(
        rank=rank,
        kind=kind,
        raw=raw,
        reason=reason,
        host=job.assignment_details.node_id,
        job=job.id,
        is_secondary=code in _SIBLINGS,
        exit_code=job.status.exit_code if is_told and job.status.HasField("exit_code") else None,
    )


def _classify(status: Any) -> tuple[AttemptClass, str, str, int]:
    number = status.status
    raw = _STATUS_NAMES.get(number, f"status {number}")
    is_over = number in (_CANCELED, _SUCCEEDED, _FAILED) or status.HasField("finalized")
    code = int(status.canceled_code)
    if status.HasField("canceled") or code or number == _CANCELED:
        name, kind = CODES.get(code, (f"code {code}", AttemptClass.CANCELED))
        raw = f"{raw} ({name})" if code else raw
        reason = str(status.canceled_for) or _REASONS.get(code, "")
        if code == _UNSCHEDULABLE and not status.HasField("finalized"):
            return AttemptClass.PENDING, raw, f"blocked: {_blocker(status) or reason}", code
        if not is_over:
            # Its replicas still stop and upload; the hardware is not free yet.
            return _LIVE.get(number, AttemptClass.RUNNING), raw, f"is being ended: {name}", code
        if code not in CODES:
            kind = AttemptClass.STOPPED if code else AttemptClass.CANCELED
        return kind, raw, reason or name, code
    if not is_over:
        kind = _LIVE.get(number, AttemptClass.PENDING)
        return kind, raw, _blocker(status) if kind is AttemptClass.PENDING else "", 0
    if number == _SUCCEEDED:
        return AttemptClass.SUCCEEDED, raw, "", 0
    if number == _FAILED or (status.HasField("exit_code") and status.exit_code != 0):
        exit_code = f"exit {status.exit_code}" if status.HasField("exit_code") else "no exit code"
        return AttemptClass.FAILED, f"{raw} ({exit_code})", str(status.message), 0
    if status.HasField("exit_code"):
        return AttemptClass.SUCCEEDED, raw, "", 0
    return AttemptClass.STOPPED, raw, str(status.message) or "over, and nothing says how", 0


def _blocker(status: Any) -> str:
    return str(status.failed_scheduling_message or status.message or "")


def _name_siblings(ranks: Sequence[RankStanding]) -> list[RankStanding]:
    """Say of a rank that only followed another one which that was."""
    first = [r for r in ranks if not r.is_secondary and r.kind.is_over]
    first = [r for r in first if r.kind is not AttemptClass.SUCCEEDED] or first
    if not first:
        return list(ranks)
    cause = min(first, key=lambda each: each.rank)
    said = f"followed rank {cause.rank} ({cause.raw}{f' on {cause.host}' if cause.host else ''})"
    return [replace(r, reason=said) if r.is_secondary else r for r in ranks]


def _oddities(newest: dict[int, Any]) -> list[str]:
    """What is off about the live replicas as a group."""
    live = {
        rank: job
        for rank, job in newest.items()
        if job.status.status in _LIVE and not job.status.HasField("finalized")
    }
    grouped = {r: j for r, j in live.items() if j.system_details.HasField("replica_group_details")}
    if not live or (not grouped and len(live) == 1):
        return []
    odd: list[str] = []
    if lone := sorted(set(live) - set(grouped)):
        odd.append(f"rank {', '.join(map(str, lone))} belongs to no replica group")
    ids = {_group(job).id for job in grouped.values()}
    if len(ids) > 1:
        odd.append(f"live replicas are of {len(ids)} groups: {', '.join(sorted(ids))}")
    size = max((_group(job).size for job in grouped.values()), default=0)
    if missing := sorted(set(range(size)) - set(newest)):
        odd.append(f"no rank {', '.join(map(str, missing))} of {size}")
    if beyond := sorted(rank for rank in live if rank >= size):
        odd.append(f"rank {', '.join(map(str, beyond))} is outside 0..{size - 1}")
    leaders = [rank for rank, job in grouped.items() if _group(job).is_leader_replica]
    if grouped and not leaders and 0 in grouped:
        odd.append("leader selection is off: no replica is the leader")
    elif leaders not in ([], [0]):
        odd.append(f"the leader is rank {', '.join(map(str, leaders))}, not 0")
    return odd


def _group(job: Any) -> Any:
    return job.system_details.replica_group_details


def _created(job: Any) -> tuple[int, int]:
    created = job.status.created
    return created.seconds, created.nanos
