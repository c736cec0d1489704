"""Append-only JSON Lines: the one way telemetry reaches the run directory.

A row is encoded where it is made and written by a flush, at the latest ``Flusher`` interval seconds
later, so a killed process loses at most that much. Nothing here raises into the caller: a full disk
drops rows and counts them, and the first row written afterwards says in ``dropped_before`` how many
are missing, because a gap must be readable as a gap.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from runtime.clock import Clock
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

SCHEMA_VERSION = 1
"""Version of every row written by this room. Readers take rows of this version and older ones."""

MAX_BUFFERED_ROWS = 20_000
"""Rows held while a disk hangs; beyond it new ones are dropped and counted. Some 10 MB."""

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who writes: rows of one update come again after a rewind, with a higher epoch."""

    attempt: int
    epoch: int


class RowWriter:
    """Appends rows to one file. Thread-safe; never raises for what the disk does.

    Each row carries ``schema_version``, ``attempt``, ``epoch`` and ``time`` (wall seconds) before
    its own fields. Values that JSON lacks are written as null and named in ``not_finite``.
    """

    def __init__(self, path: Path, owner: Owner, *, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._stamp = {
            "schema_version": SCHEMA_VERSION,
            "attempt": owner.attempt,
            "epoch": owner.epoch,
        }
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._fd: int | None = None
        self._torn = False
        self._failing = False
        self._unreported = 0
        self.written = 0
        """Rows handed to the operating system."""
        self.dropped = 0
        """Rows given up: disk full, folder gone, buffer full, or not encodable."""

    def append(self, fields: Mapping[str, object]) -> None:
        """Take one row; ``fields`` is encoded now and may change afterwards. O(size of the row)."""
        try:
            line = encode({**self._stamp, "time": round(self._clock.time(), 6), **fields})
        except (TypeError, ValueError, RecursionError) as error:
            self._count_dropped(1, f"row cannot be encoded: {error}")
            return
        with self._lock:
            full = len(self._lines) >= MAX_BUFFERED_ROWS
            if not full:
                self._lines.append(line)
        if full:
            self._count_dropped(1, "buffer full: the disk has not taken rows for a while")

    def flush(self) -> None:
        """Write what is buffered, in order. Blocks on the disk: for threads and ends."""
        with self._write_lock:
            with self._lock:
                lines, self._lines = self._lines, []
            if lines:
                self._write(lines)

    def close(self) -> None:
        """Flush and close. Rows appended later are written by a later flush. Idempotent."""
        self.flush()
        with self._write_lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _write(self, lines: list[str]) -> None:
        reported = self._unreported
        if reported:
            lines[0] = f'{{"dropped_before":{reported},{lines[0][1:]}'
        data = "".join(lines).encode()
        done = 0
        try:
            if self._fd is None:
                self._fd = _open(self.path)
                # An earlier process may have been killed in the middle of a line.
                self._torn = self._torn or not _ends_a_line(self._fd)
            if self._torn:
                data = b"\n" + data
            while done < len(data):
                done += os.write(self._fd, memoryview(data)[done:])
        except OSError as error:
            # What got through is counted as lost with the rest: its last line is torn, and a reader
            # that finds one row more than promised is not misled.
            self._torn = self._torn or done > 0
            self._count_dropped(len(lines), f"{errno.errorcode.get(error.errno or 0)}: {error}")
            self._reopen_next_time()
            return
        self.written += len(lines)
        self._torn = False
        with self._lock:
            self._unreported -= reported
            was_failing, self._failing = self._failing, False
        if was_failing:
            _log.info(Event.ROWS_RESUMED, path=str(self.path), num_dropped=self.dropped)

    def _reopen_next_time(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _count_dropped(self, count: int, reason: str) -> None:
        with self._lock:
            self.dropped += count
            self._unreported += count
            was_failing, self._failing = self._failing, True
        if not was_failing:
            _log.warning(Event.ROWS_DROPPED, path=str(self.path), reason=reason)


class Flusher:
    """One thread that flushes writers, so that no event loop waits for a disk.

    Loss on a kill is bounded by ``interval_s`` of rows per writer.
    """

    def __init__(self, *, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._writers: list[RowWriter] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-flusher", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def add(self, writer: RowWriter) -> RowWriter:
        """Flush ``writer`` from now on; returns it."""
        with self._lock:
            self._writers.append(writer)
        return writer

    def flush(self) -> None:
        """Flush all writers now, in the caller's thread."""
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.flush()

    def close(self, *, deadline_s: float = 5.0) -> bool:
        """Stop the thread and write the rest.

        Returns:
            False when the disk did not answer within ``deadline_s``; the rows in memory are then
            lost and the daemon thread stays behind, which holds nothing up.
        """
        self._stop.set()
        if not self._thread.is_alive():
            self._finish()
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.close()


def encode(row: Mapping[str, object]) -> str:
    """One JSON line with its newline.

    Numbers that are not finite become null, their dotted paths and words stand in ``not_finite``.

    Raises:
        TypeError: if a value is no JSON value and has no plain form (``item()``, a path, an id).
        ValueError: if the row refers to itself.
    """
    try:
        return _encode(row) + "\n"
    except ValueError:
        found: dict[str, str] = {}
        cleaned = cast(dict[str, object], _finite(row, "", found))
        return _encode({**cleaned, "not_finite": found}) + "\n"


def _encode(row: Mapping[str, object]) -> str:
    return json.dumps(row, allow_nan=False, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    # numpy and torch scalars answer item(); ids and paths have a text of their own.
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    if isinstance(value, set | frozenset):
        return sorted(cast(set[str], value))
    if isinstance(value, Path) or type(value).__module__.startswith("runtime."):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _finite(value: object, path: str, found: dict[str, str]) -> object:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, object], value).items()
        return {k: _finite(v, f"{path}.{k}" if path else str(k), found) for k, v in items}
    if isinstance(value, list | tuple):
        values = cast(list[object], value)
        return [_finite(v, f"{path}.{i}", found) for i, v in enumerate(values)]
    plain = value
    if not isinstance(value, str | int | float | bool | None):
        plain = _plain(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        found[path] = str(plain)
        return None
    return plain


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _ends_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"
