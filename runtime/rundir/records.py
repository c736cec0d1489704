"""The three kinds of records in the chain."""

from __future__ import annotations

import json
from typing import Annotated, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from runtime.errors import RetryBy, StoreError
from runtime.policy import PolicyId
from runtime.rundir.failure import Failure

SCHEMA_VERSION = 1
"""Newest version of the records that this code writes and reads."""

NOTHING_RESTORED = -1
"""``restored_update`` of an epoch that started before commit 0."""

WorkflowState = Literal["preparing", "training", "complete", "failed"]
Activity = Literal["running", "held", "parked", "stopped", "resuming"]


class ChainUnreadable(StoreError):
    """A record of the chain is damaged, missing, or of a newer version: no history to trust."""

    retry = RetryBy.NOBODY


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    seq: int = Field(default=-1, ge=-1)
    """Place in the chain, from 0; -1 until appended."""
    epoch: int = Field(ge=1)
    """The owner who wrote this."""
    time: float
    """Seconds since the Unix epoch by the writer's clock; for people, nothing is decided by it."""


class EpochRecord(_Record):
    """Somebody became owner. After it every append of an older owner collides."""

    kind: Literal["epoch"] = "epoch"
    attempt: int = Field(ge=1)
    host: str
    pid: int
    """Of the guard."""
    boot_id: str
    started: float
    """Start of the guard's process, seconds since boot; with pid and boot id it names it."""
    reason: str
    """Why a new epoch began: first start, resume, takeover, damaged commit."""
    restored: str | None = None
    """Policy id of the commit that is restored; None before there is one."""
    restored_seq: int | None = None
    """Where in the chain that commit stands; None with ``restored``."""
    lease_s: float | None = None
    """Duration of the lease; written once, in record 0."""

    @model_validator(mode="after")
    def _restored_as_one(self) -> EpochRecord:
        if (self.restored is None) != (self.restored_seq is None):
            raise ValueError("restored and restored_seq are given together or not at all")
        if self.restored is not None:
            PolicyId.parse(self.restored)
        return self

    @property
    def owner(self) -> tuple[str, str, int, float]:
        """Host, boot, pid and start: names the guard's process."""
        return self.host, self.boot_id, self.pid, self.started

    @property
    def restored_update(self) -> int:
        """Update of the restored commit, or -1 for none: below every update."""
        if self.restored is None:
            return NOTHING_RESTORED
        return PolicyId.parse(self.restored).update


class FileEntry(BaseModel):
    """One file of a commit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Relative to the commit's folder; no part of it leads out."""
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _stays_inside(self) -> FileEntry:
        parts = self.name.split("/")
        if self.name.startswith("/") or "" in parts or ".." in parts or "." in parts:
            raise ValueError(f"file name leads out of the commit's folder: {self.name!r}")
        return self


class CommitRecord(_Record):
    """Trainer state, ledger and clock of one update became resumable as one."""

    kind: Literal["commit"] = "commit"
    format_version: int = Field(ge=1)
    """Of the files, as ``runtime.checkpoints`` counts it."""
    update: int = Field(ge=0)
    policy: str
    """Policy id of the committed weights; its update is ``update``."""
    training_digest: str
    layout: dict[str, JsonValue]
    """Parallel sizes, backend and engine counts the files were made with."""
    data_fingerprint: str
    ledger_checksum: str
    consumed_digest: str
    """Running digest of consumed (update, group id); ledger and trainer agree on it."""
    folder: str
    """Relative to the output root, ``checkpoints/000050-e3``."""
    files: tuple[FileEntry, ...]
    parent_seq: int | None = None
    """The commit whose ledger this one's segment extends; None for commit 0."""
    detail: dict[str, JsonValue] = Field(default_factory=dict)
    """Numbers for people; nothing is decided by them."""

    @model_validator(mode="after")
    def _policy_fits(self) -> CommitRecord:
        policy = PolicyId.parse(self.policy)
        if policy.update != self.update or policy.epoch > self.epoch:
            raise ValueError(f"commit of update {self.update} in epoch {self.epoch} names {policy}")
        return self


class EndRecord(_Record):
    """The session of an epoch has exited, and this is how."""

    kind: Literal["end"] = "end"
    state: WorkflowState
    activity: Activity | None = None
    """``parked`` or ``stopped`` where the run can go on; None when complete or failed."""
    ended_by: str
    """``max_updates``, ``epochs_done``, ``wall_clock``, ``stop``, ``sigterm``, ``detached``, …"""
    update: int = Field(ge=0)
    """The last update made, committed or not."""
    failure: Failure | None = None


Record = Annotated[EpochRecord | CommitRecord | EndRecord, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def encode(record: Record) -> bytes:
    """The record as it lies in the chain."""
    return record.model_dump_json(indent=1).encode() + b"\n"


def decode(data: bytes, *, name: str) -> Record:
    """Read a record back.

    Args:
        data: content of the file.
        name: of the file, for the message.

    Raises:
        ChainUnreadable: if the record is damaged, or of a version this code does not know.
    """
    try:
        raw: object = json.loads(data)
    except ValueError as error:
        raise ChainUnreadable(
            f"{name} is no JSON ({error}); the file system damaged it: restore it from a copy",
            record=name,
        ) from error
    fields = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ChainUnreadable(
            f"{name} has schema version {version}, this Milepost reads up to {SCHEMA_VERSION}: "
            "use the version that wrote it",
            record=name,
        )
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in error.errors()
        )
        raise ChainUnreadable(
            f"{name} is no record of this version: {problems}", record=name
        ) from error
