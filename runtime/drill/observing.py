"""How a run is seen to take a blow: what noticed it, what was decided, when it went on.

Everything is read from what the run and its attendant write down anyway, with the writers' times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from runtime.drill.job import Job
from runtime.errors import StoreError
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord, Record

_DETECTED = {
    "attempt.preempted", "checkpoint.failed", "contract.violated", "engine.died",
    "engine.suspected", "group.requeued", "publication.failed", "request.failed", "rows.dropped",
    "run.failed", "run.stopped", "session.held", "step.retried",
}  # fmt: skip
_DECIDED = {
    "engine.restarted", "engine.recovered", "group.requeued", "run.stopped", "session.released",
    "step.retried",
}  # fmt: skip
_BELIEVED_S = 60.0
"""A written time that is further from ours comes from a clock that jumped."""
_ATTENDANT_DETECTED = {"lost", "held", "ended"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One thing that was written down."""

    time: float
    what: str


@dataclass(slots=True)
class Tail:
    """Whole lines of a file, each once."""

    path: Path
    _offset: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """New JSON rows since the last call; a torn line is left for later."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                row: object = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield cast("dict[str, Any]", row)


@dataclass(slots=True)
class Observer:
    """Everything one run and its attendant wrote down, in order of their times."""

    job: Job
    seen: list[Seen] = field(default_factory=list[Seen])
    commits: list[CommitRecord] = field(default_factory=list[CommitRecord])
    _chain: Chain = field(init=False)
    _num_records: int = 0
    _tails: dict[Path, Tail] = field(default_factory=dict[Path, Tail])

    def __post_init__(self) -> None:
        self._chain = Chain(self.job.root)

    @property
    def records(self) -> tuple[Record, ...]:
        """The chain as last read."""
        return self._chain.seen

    def look(self) -> None:
        """Read what is new."""
        try:
            records = self._chain.read()
        except (StoreError, OSError):
            records = self._chain.seen
        for record in records[self._num_records :]:
            self._note(record)
        self._num_records = len(records)
        root = self.job.root
        paths = [root.pipeline_lifecycle, self.job.attended]
        paths += [root.attempt(n).path / "session.log" for n in root.attempt_numbers()]
        paths += [root.journal]
        for path in paths:
            for row in self._tails.setdefault(path, Tail(path)).rows():
                self._row(row)

    def first(self, since: float, *prefixes: str) -> float | None:
        """Time of the first thing seen from ``since`` on that begins with one of these."""
        times = [s.time for s in self.seen if s.time >= since and s.what.startswith(prefixes)]
        return min(times, default=None)

    def is_complete(self) -> bool:
        """The run has come to its end."""
        return history.is_complete(self.records)

    def _note(self, record: Record) -> None:
        match record:
            case EpochRecord():
                what = "decided: epoch"
            case EndRecord(state="complete"):
                what = "progress: end"
            case EndRecord():
                what = "detected: end"
            case CommitRecord():
                what = "progress: commit"
                self.commits.append(record)
        self.seen.append(Seen(time=_believed(record.time), what=what))

    def _row(self, row: dict[str, Any]) -> None:
        when = _time(row.get("time"))
        if when is None:
            return
        when = _believed(when)
        name, saw = row.get("event"), row.get("saw")
        if name in _DETECTED or saw in _ATTENDANT_DETECTED:
            self.seen.append(Seen(time=when, what=f"detected: {name or saw}"))
        if name in _DECIDED or saw == "started":
            self.seen.append(Seen(time=when, what=f"decided: {name or saw}"))
        if name == "engine.verified":
            self.seen.append(Seen(time=when, what="progress: engine"))


def _believed(when: float) -> float:
    """When it was; now, where the writer's clock was made to jump."""
    now = time.time()
    return now if abs(when - now) > _BELIEVED_S else when


def _time(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None
