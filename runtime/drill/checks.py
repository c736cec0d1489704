"""What must hold of a drilled run that has come to its end, however it got there."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from runtime.checkpoints.files import damage
from runtime.data.history import consumed_prompts, read_history
from runtime.drill.job import Job
from runtime.drill.processes import listening, processes_of
from runtime.drill.promises import broken, unevaluated
from runtime.errors import RunError
from runtime.publication.scratch import scratch_root, sweep
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord, EpochRecord, Record
from runtime.session.accounts import committed_segments
from runtime.session.scratch import run_key
from runtime.session.status import COMPLETE, look
from runtime.telemetry.events import Event

_LEAVING_S = 20.0
_STATE = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found at the end of one run."""

    lost: int
    doubled: int
    orphans: int
    """Processes, ports, folders in shared memory and temporary folders that were left behind."""
    problems: tuple[str, ...]
    """Everything that should have held and does not, in words; empty when all is well."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What an undisturbed run of the deterministic variant committed."""

    states: Mapping[int, str]
    """SHA-256 of the trainer's state (parameters, moments, RNG) by update."""
    digests: Mapping[int, str]
    """Of everything consumed, by update."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Measure:
        """Read it from the chain of a run."""
        commits = history.standing_commits(tuple(records))
        return cls(
            states={c.update: state for c in commits if (state := _state(c)) is not None},
            digests={c.update: c.consumed_digest for c in commits},
        )


def examine(
    job: Job, *, measure: Measure | None, ports: set[int], shared_before: set[str]
) -> Verdict:
    """Hold a complete run to everything it promises.

    Args:
        job: the run.
        measure: of an undisturbed run; None where the variant promises no such thing.
        ports: that the run's processes listened on at any time.
        shared_before: folders in shared memory from before the run.
    """
    root = job.root
    problems: list[str] = []
    left = _left_behind(job, ports, shared_before)
    problems += left
    records = Chain(root).read()
    end = history.current_end(records)
    if end is None or end.state != "complete" or end.update != job.updates:
        problems.append(f"it did not end complete at update {job.updates}: {end}")
    status = look(root)
    if status.exit_code != COMPLETE:
        missing = [m for row in status.rows for m in row.missing]
        problems.append(f"its evidence is not whole: {missing or status.outstanding}")
    lost, doubled = _count(job, records, problems)
    problems += broken(job, records)
    problems += unevaluated(job, records)
    _files(job, records, problems)
    if measure is not None:
        _equal(Measure.of(records), measure, job.updates, problems)
    return Verdict(lost=lost, doubled=doubled, orphans=len(left), problems=tuple(problems))


def reached(rows: Iterable[Mapping[str, object]]) -> dict[int, int]:
    """The last update that each epoch published.

    The workflow view would not do: it is written every two seconds, which is many updates here.

    Args:
        rows: of ``pipeline_lifecycle.jsonl``.
    """
    last: dict[int, int] = {}
    for row in rows:
        epoch, update = row.get("epoch"), row.get("update")
        is_published = row.get("event") == Event.PUBLICATION_COMMITTED
        if is_published and isinstance(epoch, int) and isinstance(update, int):
            last[epoch] = max(update, last.get(epoch, 0))
    return last


def redone(records: Sequence[Record], published: Mapping[int, int]) -> int:
    """Updates that were made again after a rewind.

    Args:
        records: the whole chain.
        published: the last update that each epoch published.
    """
    epochs = [r for r in records if isinstance(r, EpochRecord)]
    return sum(
        max(0, published.get(before.epoch, 0) - max(0, after.restored_update))
        for before, after in pairwise(epochs)
    )


def _count(job: Job, records: tuple[Record, ...], problems: list[str]) -> tuple[int, int]:
    try:
        segments = committed_segments(job.root, records)
        report = read_history(segments)
    except RunError as error:
        problems.append(f"the ledger cannot be read: {error.message}")
        return 0, 0
    times = Counter(prompt for prompt, _ in consumed_prompts(segments))
    doubled = max(report.doubled, sum(n > 1 for n in times.values()))
    wanted = job.load().spec.rollout.groups_per_collection * job.updates
    if report.lost or doubled:
        problems.append(f"{report.lost} prompts are lost, {doubled} doubled")
    if report.consumed != wanted:
        problems.append(f"{report.consumed} prompts were consumed, {wanted} should have been")
    if report.digest != history.standing_commits(records)[-1].consumed_digest:
        problems.append("ledger and chain disagree about what was consumed")
    return report.lost, doubled


def _files(job: Job, records: Sequence[Record], problems: list[str]) -> None:
    root = job.root
    known = {c.folder for c in records if isinstance(c, CommitRecord)}
    there = {f"checkpoints/{p.name}" for p in root.checkpoints.iterdir()}
    problems += [f"{name} lies about without a commit" for name in sorted(there - known)]
    problems += damage(root, history.standing_commits(tuple(records))[-1])
    for path in sorted(root.path.rglob("*")):
        if path.name.startswith("."):
            problems.append(f"{path.relative_to(root.path)} was left half-written")
        elif path.suffix == ".json":
            try:
                json.loads(path.read_bytes())
            except ValueError as error:
                problems.append(f"{path.relative_to(root.path)} is no JSON: {error}")


def _equal(found: Measure, measure: Measure, updates: int, problems: list[str]) -> None:
    if updates not in found.states:
        problems.append(f"no state of update {updates} is committed")
    for name in ("states", "digests"):
        ours: Mapping[int, str] = getattr(found, name)
        theirs: Mapping[int, str] = getattr(measure, name)
        wrong = sorted(u for u in ours.keys() & theirs.keys() if ours[u] != theirs[u])
        if wrong:
            problems.append(f"{name} differ from the undisturbed run's from update {wrong[0]} on")


def _left_behind(job: Job, ports: set[int], shared_before: set[str]) -> list[str]:
    until = time.monotonic() + _LEAVING_S
    left: list[psutil.Process] = []
    while left := list(processes_of(job.root.attempts)):
        if time.monotonic() >= until:
            break
        time.sleep(0.2)
    found = [f"process {p.pid} is left: {' '.join(p.cmdline())[:120]}" for p in left]
    still = listening(left) & ports
    found += [f"port {port} is still listened on" for port in sorted(still)]
    swept = {str(folder) for folder in sweep(scratch_root())} - shared_before
    found += [f"{folder} was left in shared memory" for folder in sorted(swept)]
    base = Path(tempfile.gettempdir()) / f"mp-{os.getuid()}"
    found += [f"{p} was left" for p in sorted(base.glob(f"{run_key(job.root.path)}-*"))]
    return found


def shared_folders() -> set[str]:
    """Folders in shared memory, of anybody on this machine."""
    return {str(folder) for folder in scratch_root().glob("milepost-*")}


def _state(commit: CommitRecord) -> str | None:
    entries = [e for e in commit.files if Path(e.name).name.endswith(_STATE)]
    return ",".join(e.sha256 for e in entries) if entries else None
