"""The journal: what happened, a row each. On a full disk rows are dropped and counted."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import cast

from runtime.clock import Clock, SystemClock
from runtime.rundir import atomic
from runtime.rundir.failure import Failure
from runtime.rundir.layout import AttemptDir

RESERVE_BYTES = 1 << 20


class Journal:
    """Appends rows of one process to ``journal.jsonl``; several processes share the file."""

    def __init__(
        self, attempt: AttemptDir, *, epoch: int, role: str, clock: Clock | None = None
    ) -> None:
        self._path = attempt.root.journal
        self._reserve = attempt.reserve
        self._bound = {"attempt": attempt.number, "epoch": epoch, "role": role}
        self._clock = clock or SystemClock()
        self._is_torn = False
        self.dropped = 0
        """Rows that found no space since the last one that did."""

    def set_reserve(self) -> bool:
        """Lay aside 1 MiB for the failure record. Idempotent.

        Returns:
            False if there is no space for it even now.
        """
        if self._reserve.exists() and self._reserve.stat().st_size == RESERVE_BYTES:
            return True
        try:
            # Random bytes: a file system that compresses would keep no space for zeros.
            atomic.write_bytes(self._reserve, secrets.token_bytes(RESERVE_BYTES), durable=True)
        except (atomic.DiskFull, OSError):
            return False
        return True

    def append(self, event: str, **fields: object) -> bool:
        """Append a row; never raises for want of space.

        Args:
            event: ``noun.past_tense``, a constant.
            **fields: JSON values; others are stored as their ``repr``.

        Returns:
            Whether it was written.
        """
        rows = [self._row(event, fields)]
        if self.dropped:
            rows.insert(0, self._row("journal.dropped", {"rows": self.dropped}))
        data = b"".join(rows)
        if self._is_torn:
            data = b"\n" + data
        try:
            written = self._write(data)
        except OSError:
            self.dropped += 1
            return False
        if written < len(data):
            # A row that was cut off is ended by the next one's newline; readers skip it.
            self._is_torn = written > 0 or self._is_torn
            self.dropped += 1
            return False
        self._is_torn = False
        self.dropped = 0
        return True

    def fail(self, failure: Failure) -> bool:
        """Append the failure record, freeing the reserve for it, and make it durable.

        Returns:
            Whether it was written.
        """
        with suppress(FileNotFoundError):
            self._reserve.unlink()
        if not self.append("run.failed", failure=failure.model_dump(mode="json")):
            return False
        with suppress(OSError), self._path.open("rb") as file:
            os.fsync(file.fileno())
        return True

    def _row(self, event: str, fields: dict[str, object]) -> bytes:
        row = {"time": self._clock.time(), "event": event, **self._bound, **fields}
        return json.dumps(row, default=repr, ensure_ascii=False).encode() + b"\n"

    def _write(self, data: bytes) -> int:
        atomic.point("append", self._path)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            return os.write(fd, data)
        finally:
            os.close(fd)


def read_rows(path: Path) -> list[dict[str, object]]:
    """All whole rows of a journal in order; torn ones are left out, a missing file has none."""
    rows: list[dict[str, object]] = []
    for line in (atomic.read_bytes(path) or b"").splitlines():
        try:
            row: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(cast("dict[str, object]", row))
    return rows
