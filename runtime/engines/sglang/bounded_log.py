"""A server's log that cannot fill a disk: it keeps its newest part and the one before."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

MAX_BYTES = 32 * 2**20
"""Of the file being written; the part before it is kept too, as ``<name>.1``."""
_LOOK_EVERY_S = 2.0
_TAIL_BYTES = 16 * 1024


class BoundedLog:
    """A file that processes append to and that is moved on by its owner.

    Processes write straight into the file, so that none of them waits for anybody and their last
    words are there whoever dies first. The owner copies a full file to ``<name>.1`` and empties it;
    lines written between the copy and the emptying are lost.

    Args:
        path: the log.
        max_bytes: size at which it is moved on.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> int:
        """A descriptor to append to, for a child; the caller closes its own."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def watch(self) -> None:
        """Keep it bounded from now on, by a daemon thread."""
        self._thread = threading.Thread(target=self._keep, name="engine-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def bound(self) -> None:
        """Move a full file on."""
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
            os.truncate(self.path, 0)

    def tail(self, since: int = 0, num_chars: int = 2000) -> str:
        """The end of what was written after ``since`` bytes; empty when there is nothing."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                # A file that was emptied meanwhile is read from its start.
                start = since if since <= end else 0
                file.seek(max(start, end - _TAIL_BYTES))
                return file.read().decode(errors="replace")[-num_chars:]
        except FileNotFoundError:
            return ""

    def size(self) -> int:
        """Bytes in the file now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _keep(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self.bound()
