"""A plan of faults: which point fails, how, how often; and the count of what fired.

The plan is a file and may change while its processes run. What fired is appended and synced
*before* it takes effect, so that the count of a process that killed itself survives it.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VARIABLE = "MILEPOST_FAULT_PLAN"
"""Environment variable with the folder of the plan."""

_PLAN = "plan.json"
_FIRED = "fired.jsonl"
_FOREVER_S = 86400.0
_LOOK_S = 0.02


class Kind(StrEnum):
    """What happens at a point."""

    KILL = "kill"
    """SIGKILL of the process that gets there."""
    HANG = "hang"
    """It stays there for ``seconds``, by default for good."""
    SLOW = "slow"
    """It stays there for ``seconds`` and goes on."""
    HOLD = "hold"
    """It stays there for as long as this fault is in the plan, and ``seconds`` at most."""
    DROP = "drop"
    """A message is lost there: the point's own code says which."""
    DUPLICATE = "duplicate"
    """A message arrives twice there."""
    TORN = "torn"
    """Half of the file is there and the process is gone: a loss of power before the fsync."""
    DISK_FULL = "disk_full"
    """The operation finds no space left."""
    CLOCK_JUMP = "clock_jump"
    """Wall time of the process jumps by ``seconds``, forwards or back."""


class Fault(BaseModel):
    """One entry of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Names it in the record; unique within the plan."""
    point: str
    """Name of a point, or a pattern such as ``commit.*``."""
    kind: Kind
    after: int = Field(default=0, ge=0)
    """Passages of one process that go by unharmed first."""
    times: int = Field(default=1, ge=1)
    """How often it fires at most, all processes together."""
    seconds: float | None = None
    """Of a hang, a slow passage or a jump; at most, of what is held."""


class Fired(BaseModel):
    """One firing, as the record has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    point: str
    kind: Kind
    pid: int
    time: float
    """Seconds since the Unix epoch, not subject to the plan's own jumps."""


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    faults: tuple[Fault, ...] = ()


class FaultPlan:
    """What is to go wrong in this process, as the plan's folder says. Thread-safe.

    Args:
        folder: holds ``plan.json`` and the record ``fired.jsonl``; made when missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._plan = folder / _PLAN
        self._record = folder / _FIRED
        self._lock = threading.Lock()
        self._read_as: tuple[int, int] | None = None
        self._faults: tuple[Fault, ...] = ()
        self._passages: dict[str, int] = {}
        self._jumped_s = 0.0

    # -- the side of whoever plans ----------------------------------------------------------------

    def arm(self, faults: Sequence[Fault]) -> None:
        """Make these the plan of every process that follows the folder, from now on."""
        temporary = self._plan.with_name(f".{_PLAN}.{os.getpid()}")
        temporary.write_text(_Plan(faults=tuple(faults)).model_dump_json())
        temporary.replace(self._plan)

    def fired(self, fault_id: str | None = None) -> list[Fired]:
        """What fired so far, in order; of one fault, or of all."""
        try:
            lines = self._record.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        rows = [Fired.model_validate_json(line) for line in lines if line.endswith(b"}")]
        return [row for row in rows if fault_id in (None, row.id)]

    # -- the side of production code --------------------------------------------------------------

    def reach(self, point: str, path: Path | None = None) -> Kind | None:
        """Pass a point: go on unharmed, or not at all, or with an error.

        Args:
            point: its name in ``points.POINTS``.
            path: the file it is about, where there is one.

        Returns:
            ``DROP`` or ``DUPLICATE`` where the caller has to do it; otherwise None.

        Raises:
            OSError: "no space left", of a full disk.
        """
        fault = self._due(point)
        if fault is None:
            return None
        if fault.kind in (Kind.HANG, Kind.SLOW):
            time.sleep(_stay_s(fault))
            return None
        if fault.kind is Kind.HOLD:
            until = time.monotonic() + _stay_s(fault)
            while self._stands(fault) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            return None
        return self._act(fault, path)

    async def pause(self, point: str) -> Kind | None:
        """As ``reach``, at an await: what stays is this task, not the event loop."""
        fault = self._due(point)
        if fault is None:
            return None
        if fault.kind in (Kind.HANG, Kind.SLOW, Kind.HOLD):
            import anyio  # the guard has no use for it

            if fault.kind is not Kind.HOLD:
                await anyio.sleep(_stay_s(fault))
                return None
            with anyio.move_on_after(_stay_s(fault)):
                while self._stands(fault):  # noqa: ASYNC110 - another process changes the file
                    await anyio.sleep(_LOOK_S)
            return None
        return self._act(fault, None)

    def file(self, operation: str, path: Path) -> None:
        """Pass the point of a file operation; its name follows from the path."""
        self.reach(file_point(operation, path), path)

    def now(self, point: str) -> float:
        """Wall time, with whatever jumps were planned."""
        self.reach(point)
        return time.time() + self._jumped_s

    # -- inside -----------------------------------------------------------------------------------

    def _due(self, point: str) -> Fault | None:
        with self._lock:
            for fault in self._current():
                if not fnmatch.fnmatchcase(point, fault.point):
                    continue
                passages = self._passages.get(fault.id, 0)
                self._passages[fault.id] = passages + 1
                if passages >= fault.after and self._take(fault, point):
                    return fault
        return None

    def _stands(self, fault: Fault) -> bool:
        with self._lock:
            return fault in self._current()

    def _current(self) -> tuple[Fault, ...]:
        try:
            found = self._plan.stat()
        except FileNotFoundError:
            return ()
        read_as = (found.st_mtime_ns, found.st_ino)
        if read_as != self._read_as:
            self._faults = _Plan.model_validate_json(self._plan.read_bytes()).faults
            self._read_as = read_as
        return self._faults

    def _take(self, fault: Fault, point: str) -> bool:
        """Count one firing durably, unless all of them are used up."""
        fd = os.open(self._record, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if len(self.fired(fault.id)) >= fault.times:
                return False
            row = Fired(
                id=fault.id, point=point, kind=fault.kind, pid=os.getpid(), time=time.time()
            )
            os.write(fd, row.model_dump_json().encode() + b"\n")
            os.fsync(fd)
            return True
        finally:
            os.close(fd)

    def _act(self, fault: Fault, path: Path | None) -> Kind | None:
        match fault.kind:
            case Kind.KILL:
                _die()
            case Kind.TORN:
                if path is not None and path.is_file():
                    os.truncate(path, path.stat().st_size // 2)
                _die()
            case Kind.DISK_FULL:
                where = None if path is None else str(path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
            case Kind.CLOCK_JUMP:
                self._jumped_s += fault.seconds or 0.0
                return None
            case _:
                return fault.kind


_AREAS = {
    "chain": "chain",
    "checkpoints": "commit",
    "ledger": "ledger",
    "control": "control",
    "attempts": "attempt",
    "evaluations": "evaluation",
    "export": "export",
    "rollouts": "rollout",
}


def file_point(operation: str, path: Path) -> str:
    """Name of a file operation's point: ``chain.link``, ``commit.fsync``, ``view.replace``."""
    for part in reversed(path.parts):
        if part in _AREAS:
            return f"{_AREAS[part]}.{operation}"
    return f"view.{operation}"


def from_environment() -> FaultPlan | None:
    """The plan that the environment names; None where it names none."""
    folder = os.environ.get(VARIABLE)
    return FaultPlan(Path(folder)) if folder else None


def _stay_s(fault: Fault) -> float:
    if fault.seconds is not None:
        return fault.seconds
    return 1.0 if fault.kind is Kind.SLOW else _FOREVER_S


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
