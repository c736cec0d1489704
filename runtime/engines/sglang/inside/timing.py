"""How long the server's part of a publication took, one line in its log for each."""

from __future__ import annotations

import json
import logging
import time
from types import TracebackType
from typing import Self

MARK = "milepost.took "
"""Before the JSON of a line."""

_server_log = logging.getLogger("milepost")
"""The server's own log, which is read beside its other lines: no events of the run."""


class Timing:
    """Times one piece of work, and says so when it went through.

    Args:
        what: of the line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._queued_at: float | None = None

    def __enter__(self) -> Self:
        # Of the wall clock: whoever called it lies on the same host, and compares.
        self._began_at = time.time()
        return self

    def queued(self) -> None:
        """From now on only the device works."""
        self._queued_at = time.time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        ended_at = time.time()
        told = {
            "what": self._what,
            "began_at": round(self._began_at, 6),
            "queued_s": round((self._queued_at or ended_at) - self._began_at, 6),
            "elapsed_s": round(ended_at - self._began_at, 6),
        }
        _server_log.info("%s%s", MARK, json.dumps(told))
