"""The files of one attempt that pass between launcher, guard and session."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import StoreError
from runtime.rundir import atomic
from runtime.rundir.failure import Failure
from runtime.rundir.layout import AttemptDir
from runtime.rundir.records import Activity, WorkflowState
from runtime.rundir.workflow import Counts

EXIT_COMPLETE = 0
"""A guard's exit status: the end record of the run says complete. No other end is a success."""
EXIT_FAILED = 1
"""The end record says failed."""
EXIT_NOT_OWNER = 3
"""Another process owns the run, or became its owner; this one wrote nothing more of the run. Where
it never was the owner, ``turned-away.json`` in its own folder says so."""
EXIT_STOPPED = 5
"""Stopped or parked in good order, as was asked; the run is not complete."""
EXIT_TERMINATED = 6
"""Ended by SIGTERM, in good order or at the end of its grace; the run is not complete."""


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1

    def encode(self) -> bytes:
        """The file's content."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes | None, name: object) -> Self:
        """Read a file's content back.

        Raises:
            StoreError: if there is none, or it is damaged or of a newer version.
        """
        if data is None:
            raise StoreError(f"{name} is missing", file=str(name))
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise StoreError(f"{name} cannot be read: {error}", file=str(name)) from error


class Claim(_File):
    """Who launches an attempt, and of what; created exclusively, the winner launches."""

    launcher: str
    """Backend and person or flow: ``local``, ``beaker`` …"""
    host: str
    boot_id: str
    pid: int
    started: float
    """With the fields above: names the launching process, so that a dead one is known."""
    spec_digest: str
    """Over the whole resolved run file."""
    training_digest: str
    time: float
    nonce: str
    """Tells two claims of one process apart."""


class Started(_File):
    """The guard's process, as its local launcher saw it start."""

    pid: int
    started: float | None
    """Seconds since boot; None if it was gone at once."""


class TurnedAway(_File):
    """A guard left without having owned the run; for whoever cannot see its process."""

    pid: int
    host: str
    reason: str
    time: float


class AttemptFile(_File):
    """What the guard is to do; written by the winner of the claim, never changed."""

    run: str
    """The run's name."""
    training_digest: str
    session: tuple[str, ...] = ()
    """Command of the session, the attempt's folder is appended; empty means the driver."""
    companion: tuple[str, ...] = ()
    """Command that the guard starts beside the session and does not depend on; ``{attempt}`` stands
    for the attempt's folder. Empty: none."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the session's environment; never a secret."""
    lease_s: float = Field(gt=0)
    """Used only for the first record; later attempts take what chain/0 says."""
    grace_s: float = Field(default=60.0, ge=0)
    """From SIGTERM to SIGKILL of the session."""
    expected: Counts = Field(default_factory=Counts)
    """What the whole run is expected to make, for the workflow view."""
    ray: Literal["own", "group", "job"] = "own"
    """The session's Ray: its own; its own, joined by the other replicas; or the one whose job the
    guard is."""
    results: str | None = None
    """Folder that the scheduler keeps when the job is over; None: it has none."""
    reason: str = "start"
    """Why this attempt is made; goes into the epoch record."""

    @classmethod
    def read(cls, attempt: AttemptDir) -> AttemptFile:
        """Read it.

        Raises:
            StoreError: if it is missing or cannot be read.
        """
        return cls.decode(atomic.read_bytes(attempt.attempt), attempt.attempt)


class GuardFile(_File):
    """What the guard tells the processes of its epoch."""

    epoch: int
    host: str
    boot_id: str
    pid: int
    started: float
    fifo: str
    """The dead-man's switch: end of file means that the guard is gone."""
    lease: str
    """Path of the lease's marker."""
    lease_s: float
    lease_device: int
    lease_inode: int

    @classmethod
    def read(cls, attempt: AttemptDir) -> GuardFile:
        """Read it.

        Raises:
            StoreError: if it is missing or cannot be read.
        """
        return cls.decode(atomic.read_bytes(attempt.guard), attempt.guard)


class Outcome(_File):
    """The session's own last words; without them its exit code speaks."""

    epoch: int
    state: WorkflowState
    activity: Activity | None = None
    """``stopped`` or ``parked`` where the run can go on; None when complete or failed."""
    ended_by: str
    update: int = Field(ge=0)
    """The last update made, committed or not."""
    failure: Failure | None = None

    def write(self, attempt: AttemptDir) -> None:
        """Write it, durably; the last word counts."""
        atomic.write_bytes(attempt.outcome, self.encode(), durable=True)
