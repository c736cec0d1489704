"""What people and flows ask of a session: small files under ``control/``, read at every poll."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from runtime import faults
from runtime.rundir import atomic
from runtime.rundir.history import current_end, newest_epoch
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Mark
from runtime.rundir.records import Record

StopMode = Literal["stop", "final", "now"]
"""``stop``: commit and stop; ``final``: end as the wall-clock bound would; ``now``: kill."""

_FILES: dict[StopMode, str] = {
    "now": "stop-now.json",
    "final": "stop-final.json",
    "stop": "stop.json",
}
_ID = re.compile(r"[A-Za-z0-9._-]+")


class StopRequest(BaseModel):
    """A request to end the session of one epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    mode: StopMode
    epoch: int
    """The owner it is meant for: a later one is not stopped by it."""
    by: str
    """Who asks."""
    time: float


class Control:
    """The control files of one run. Every request is atomic and idempotent."""

    def __init__(self, root: RunRoot) -> None:
        self._folder = root.control

    def request_stop(self, mode: StopMode, *, epoch: int, by: str, time: float) -> StopRequest:
        """Ask the session of ``epoch`` to end; a request that already stands is kept.

        Args:
            mode: how.
            epoch: the owner meant, see ``epoch_to_stop``.
            by: who asks, for the record.
            time: seconds since the Unix epoch.

        Returns:
            The request that stands now.
        """
        standing = self._read_stop(mode)
        if standing is not None and standing.epoch >= epoch:
            return standing
        request = StopRequest(mode=mode, epoch=epoch, by=by, time=time)
        self._folder.mkdir(parents=True, exist_ok=True)
        data = request.model_dump_json().encode() + b"\n"
        atomic.write_bytes(self._folder / _FILES[mode], data)
        return request

    def stop_request(self, epoch: int) -> StopRequest | None:
        """The strongest request meant for ``epoch``: now, then final, then stop."""
        if faults.plan is not None and faults.plan.reach("control.read") is faults.Kind.DROP:
            return None
        for mode in _FILES:
            request = self._read_stop(mode)
            if request is not None and request.epoch == epoch:
                return request
        return None

    def request_retry(self, failure_id: str) -> None:
        """Ask for one more try of the step that is held by this failure. Idempotent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._retry(failure_id)
        atomic.point("touch", path)
        path.touch()

    def take_retry(self, failure_id: str) -> bool:
        """Whether a retry was asked for; asking it here uses the request up."""
        path = self._retry(failure_id)
        atomic.point("unlink", path)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def attach(self) -> None:
        """Renew the sign that somebody is attached."""
        path = self._folder / "attached"
        atomic.point("touch", path)
        try:
            os.utime(path)
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.touch()

    def attached(self) -> Mark | None:
        """The sign as it is now, for a ``liveness.Watch``; None if nobody ever attached."""
        return Mark.of(self._folder / "attached")

    def _retry(self, failure_id: str) -> Path:
        if not _ID.fullmatch(failure_id):
            raise ValueError(f"not a failure id: {failure_id!r}")
        return self._folder / f"retry-{failure_id}"

    def _read_stop(self, mode: StopMode) -> StopRequest | None:
        data = atomic.read_bytes(self._folder / _FILES[mode])
        if data is None:
            return None
        try:
            return StopRequest.model_validate_json(data)
        except ValidationError:
            return None


def epoch_to_stop(records: tuple[Record, ...]) -> int:
    """The epoch that a stop asked for now is meant for: the one that runs, else the next."""
    newest = newest_epoch(records)
    if newest is None:
        return 1
    return newest.epoch if current_end(records) is None else newest.epoch + 1
