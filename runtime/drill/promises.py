"""Promises of which the run directory itself shows whether they were kept, and how they were not.

Each is judged by what was written down at the time, and none by the function that keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.schedule import evaluation_due
from runtime.checkpoints.resume import NoValidCommit
from runtime.drill.job import Job
from runtime.policy import PolicyId
from runtime.rundir.journal import read_rows
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord, EpochRecord, Record
from runtime.telemetry.events import Event


def broken(job: Job, records: Sequence[Record]) -> list[str]:
    """What holds of a run at any moment, and does not hold of this one."""
    return [
        *_damaged(records),
        *_claimed_twice(job),
        *_succeeded_twice(job),
        *_taken_twice(job.root, records),
        *_unjoined(job.root),
    ]


def unevaluated(job: Job, records: Sequence[Record]) -> Iterator[str]:
    """Updates of a complete run that no policy of its history was evaluated at."""
    spec = job.load().spec
    due = [u for u in range(1, job.updates + 1) if evaluation_due(spec, u)]
    for update in sorted({*due, job.updates}):
        for name in spec.evaluation.sets:
            made = sorted(_evaluated(job.root, update, name))
            if any(_is_of_history(records, policy) for policy in made):
                continue
            undone = f"; {', '.join(map(str, made))} was undone, and taken for it" if made else ""
            yield f"update {update} was not evaluated on {name}{undone}"


def _damaged(records: Sequence[Record]) -> Iterator[str]:
    """No commit may turn out damaged: the record is the promise that its files are there."""
    for record in records:
        found = ""
        if isinstance(record, EpochRecord) and "checkpoints/" in record.reason:
            found = record.reason
        elif isinstance(record, EndRecord) and record.failure is not None:
            is_it = record.failure.error_class == NoValidCommit.__name__
            found = record.failure.message if is_it else ""
        if found:
            yield f"epoch {record.epoch} found a damaged commit: {found}"


def _claimed_twice(job: Job) -> Iterator[str]:
    """Of several flows that take a lost run up, one starts the attempt: its claim is exclusive."""
    started: dict[object, set[object]] = {}
    for row in read_rows(job.attended):
        if row.get("saw") == "started":
            started.setdefault(row.get("attempt"), set()).add(row.get("pid"))
    for attempt, pids in started.items():
        if len(pids) > 1:
            yield f"attempt {attempt} was claimed and started by {len(pids)} flows, not by one"


def _succeeded_twice(job: Job) -> Iterator[str]:
    """Of several flows that find an attempt lost, one starts the next; the others attach to it."""
    started: dict[object, dict[object, object]] = {}
    for row in read_rows(job.attended):
        if row.get("saw") == "started" and row.get("after") is not None:
            started.setdefault(row["after"], {})[row.get("pid")] = row.get("attempt")
    for lost, attempts in started.items():
        if len({*attempts.values()}) > 1:
            made = " and ".join(sorted(str(attempt) for attempt in attempts.values()))
            yield f"attempt {lost} was succeeded by {made}, each of another flow"


def _taken_twice(root: RunRoot, records: Sequence[Record]) -> Iterator[str]:
    """Of several guards that take an epoch, one has it: its record is appended exclusively."""
    owner: dict[object, int] = {
        record.epoch: record.attempt for record in records if isinstance(record, EpochRecord)
    }
    for row in read_rows(root.journal):
        epoch, attempt = row.get("epoch"), row.get("attempt")
        if row.get("event") == Event.EPOCH_TAKEN and owner.get(epoch, attempt) != attempt:
            yield f"attempt {attempt} took epoch {epoch}, and attempt {owner[epoch]} did as well"


def _unjoined(root: RunRoot) -> Iterator[str]:
    """No request of a group's attempt goes on once the attempt was settled, requeued or not."""
    for number in root.attempt_numbers():
        for row in read_rows(root.attempt(number).session_log):
            if row.get("event") == Event.GROUP_UNJOINED:
                yield (
                    f"group {row.get('prompt')} was given up with {row.get('requests')} of its "
                    "requests still out: they were not joined"
                )


def _evaluated(root: RunRoot, update: int, name: str) -> Iterator[PolicyId]:
    """Policies with this update of which a try has succeeded."""
    for folder in root.evaluations.glob(f"e*.u{update}/{name}"):
        if any(has_succeeded(path) for path in folder.glob("tries/*/result.json")):
            yield PolicyId.parse(folder.parent.name)


def has_succeeded(result: Path) -> bool:
    """A try of an evaluation has, by its ``result.json``."""
    return json.loads(result.read_bytes()).get("state") == "succeeded"


def _is_of_history(records: Sequence[Record], policy: PolicyId) -> bool:
    """No later epoch went back to before it."""
    later = [r for r in records if isinstance(r, EpochRecord) and r.epoch > policy.epoch]
    return min((r.restored_update for r in later), default=policy.update) >= policy.update
