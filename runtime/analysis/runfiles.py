"""Reading an output root: tolerant of what is missing or torn, exact about what counts.

After a rewind updates come again under a higher epoch. A row of (epoch e, update u) is superseded
when a later epoch began at or below u: the chain says where epochs began, the rows themselves where
it does not. So the highest epoch wins per update, and a tail that no later epoch reached yet is
superseded too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from runtime.errors import RunError
from runtime.evaluation.records import Result
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EpochRecord

NEWEST_SCHEMA = 1
"""Rows of a newer schema are left out and named."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Note:
    """Something about a file that a reader of the result must know."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The readable rows of one file, in the order they were written."""

    name: str
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()
    num_dropped: int = 0
    """Rows the writer had to give up, as it says itself."""

    @property
    def is_missing(self) -> bool:
        """There was no file to read."""
        return any(note.problem.startswith("missing") for note in self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One metric row on its axis."""

    step: float
    epoch: int
    attempt: int
    time: float
    values: Mapping[str, float]
    """Measured values only; what was null is absent, never 0."""
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """Which epoch took over from which update."""

    first_update: Mapping[int, int] = field(default_factory=dict[int, int])
    """By epoch: the first update it made or will make (restored + 1)."""

    def is_superseded(self, epoch: int, update: float) -> bool:
        """Whether a later epoch makes, or made, this update again."""
        return any(e > epoch and first <= update for e, first in self.first_update.items())

    def joined(self, other: History) -> History:
        """Both sources together; the earlier start counts where they disagree."""
        merged = dict(self.first_update)
        for epoch, first in other.first_update.items():
            merged[epoch] = min(first, merged.get(epoch, first))
        return History(merged)

    @classmethod
    def of_rows(cls, places: Iterable[tuple[int, float]]) -> History:
        """From (epoch, update) pairs alone."""
        first: dict[int, int] = {}
        for epoch, update in places:
            first[epoch] = min(int(update), first.get(epoch, int(update)))
        return cls(first)


class RunFiles:
    """One output root. Reads put what was missing or damaged into ``notes``; none raises for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._notes: dict[Note, None] = {}
        self._history: History | None = None
        self._cache: dict[str, RowFile] = {}

    @property
    def notes(self) -> tuple[Note, ...]:
        """What was found missing or damaged so far, each once, in the order of reading."""
        return tuple(self._notes)

    def document(self, name: str) -> Mapping[str, object] | None:
        """A JSON object such as ``workflow.json``; None (and a note) where it cannot be read."""
        path = self.root / name
        try:
            value: object = json.loads(path.read_text())
        except FileNotFoundError:
            self._note(name, "missing")
            return None
        except (OSError, ValueError) as error:
            self._note(name, f"cannot be read: {error}")
            return None
        if not isinstance(value, dict):
            self._note(name, "holds no JSON object")
            return None
        return cast(Row, value)

    def rows(self, name: str) -> RowFile:
        """The rows of ``name``; empty (and a note) where there are none. Read once."""
        if name not in self._cache:
            found = read_rows(self.root / name, name)
            for note in found.notes:
                self._notes[note] = None
            self._cache[name] = found
        return self._cache[name]

    def contracts(self) -> dict[str, RowFile]:
        """Rows of every contract by its name."""
        files = sorted((self.root / "contracts").glob("*.jsonl"))
        if not files:
            self._note("contracts/", "missing")
        return {path.stem: self.rows(f"contracts/{path.name}") for path in files}

    def history(self) -> History:
        """From the chain; empty (and a note) where that cannot be read."""
        if self._history is None:
            self._history = self._read_history()
        return self._history

    def points(self, axis: str) -> list[Point]:
        """Metric rows of one axis, ascending by step; superseded ones are marked and kept.

        Args:
            axis: ``train/update``, ``rollout/collection``, ``errors/elapsed_seconds`` or
                ``evaluation/update``. Rows over elapsed seconds belong to a process, not to an
                update: none of them is superseded.
        """
        points = [
            point
            for row in self.rows("metrics.jsonl").rows
            if row.get("axis") == axis and (point := _point(row)) is not None
        ]
        if axis == "evaluation/update":
            points += self._late_evaluations(points)
        if axis == "errors/elapsed_seconds":
            return sorted(points, key=lambda p: (p.epoch, p.step))
        history = History.of_rows((p.epoch, p.step) for p in points)
        if axis != "rollout/collection":  # the chain counts updates, not collections
            history = history.joined(self.history())
        marked = mark(points, history)
        return sorted(marked, key=lambda p: (p.step, p.epoch))

    def _late_evaluations(self, told: Sequence[Point]) -> list[Point]:
        """Results that came when no session was there any more to put them on the axis."""
        known = {(p.step, name.split("/")[1]) for p in told for name in p.values if "/" in name}
        late: list[Point] = []
        for path in sorted((self.root / "evaluations").glob("e*.u*/*/tries/*/result.json")):
            folder = path.parents[2]
            try:
                policy = PolicyId.parse(folder.parent.name)
                result = Result.model_validate_json(path.read_bytes())
            except (OSError, ValueError):
                self._note(str(path.relative_to(self.root)), "no readable result")
                continue
            if result.state == "succeeded" and (policy.update, folder.name) not in known:
                values = {f"evaluation/{folder.name}/{k}": v for k, v in result.metrics.items()}
                late.append(
                    Point(
                        step=policy.update,
                        epoch=policy.epoch,
                        attempt=0,
                        time=result.time,
                        values=values,
                    )
                )
        return late

    def _read_history(self) -> History:
        if not (self.root / "chain").is_dir():
            self._note("chain/", "missing; superseded rows are told by their epochs alone")
            return History()
        try:
            records = Chain(RunRoot.of(self.root)).read()
        except (RunError, OSError) as error:
            self._note("chain/", f"cannot be read: {error}")
            return History()
        return History(
            {r.epoch: r.restored_update + 1 for r in records if isinstance(r, EpochRecord)}
        )

    def _note(self, name: str, problem: str) -> None:
        self._notes[Note(name, problem)] = None


def mark(points: Sequence[Point], history: History) -> list[Point]:
    """The same points, superseded ones marked; of equal (step, epoch) the last row counts.

    Evaluation rows of several sets share a step: rows are only merged when their keys overlap.
    """
    newest: dict[tuple[float, int, tuple[str, ...]], int] = {}
    for i, p in enumerate(points):
        newest[p.step, p.epoch, tuple(sorted(p.values))] = i
    keep = set(newest.values())
    return [
        Point(
            step=p.step,
            epoch=p.epoch,
            attempt=p.attempt,
            time=p.time,
            values=p.values,
            is_superseded=history.is_superseded(p.epoch, p.step),
        )
        for i, p in enumerate(points)
        if i in keep
    ]


def current_rows(rows: Iterable[Row], history: History) -> Callable[[Row], bool]:
    """A test for rows with ``epoch`` and ``update``: not superseded. Rows without an update are."""
    places: list[tuple[int, float]] = []
    for row in rows:
        epoch, update = number(row, "epoch"), number(row, "update")
        if epoch is not None and update is not None:
            places.append((int(epoch), update))
    joined = history.joined(History.of_rows(places))

    def is_current(row: Row) -> bool:
        update, epoch = number(row, "update"), number(row, "epoch")
        if update is None or epoch is None:
            return True
        return not joined.is_superseded(int(epoch), update)

    return is_current


def read_rows(path: Path, name: str) -> RowFile:
    """Read a JSON Lines file.

    Lines that are no object are skipped and counted in a note: a process killed while writing
    leaves half a line. Rows of a newer schema are left out likewise.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return RowFile(name=name, rows=(), notes=(Note(name, "missing"),))
    except OSError as error:
        return RowFile(name=name, rows=(), notes=(Note(name, f"cannot be read: {error}"),))
    rows: list[Row] = []
    num_damaged = num_newer = num_dropped = 0
    for line in data.splitlines():
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            num_damaged += 1
        elif (number(row, "schema_version") or 0) > NEWEST_SCHEMA:
            num_newer += 1
        else:
            rows.append(row)
            num_dropped += int(number(row, "dropped_before") or 0)
    notes: list[Note] = []
    if num_damaged:
        notes.append(Note(name, f"{num_damaged} damaged line(s) skipped"))
    if num_newer:
        notes.append(Note(name, f"{num_newer} row(s) of a newer schema left out"))
    if num_dropped:
        notes.append(Note(name, f"{num_dropped} row(s) were dropped while writing (disk full?)"))
    return RowFile(name=name, rows=tuple(rows), notes=tuple(notes), num_dropped=num_dropped)


def number(row: Row, key: str) -> float | None:
    """The finite number under ``key``; None where it is absent, null or something else."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def mapping(row: Row, key: str) -> Row:
    """The object under ``key``; empty where it is absent or something else."""
    value = row.get(key)
    return cast(Row, value) if isinstance(value, dict) else {}


def _parse(line: bytes) -> Row | None:
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return cast(Row, value) if isinstance(value, dict) else None


def _point(row: Row) -> Point | None:
    named = mapping(row, "values")
    step, epoch = number(row, "step"), number(row, "epoch")
    if step is None or epoch is None:
        return None
    measured = {key: value for key in named if (value := number(named, key)) is not None}
    return Point(
        step=step,
        epoch=int(epoch),
        attempt=int(number(row, "attempt") or 0),
        time=number(row, "time") or 0.0,
        values=measured,
    )
