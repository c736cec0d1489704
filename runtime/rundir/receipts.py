"""Receipts: small proofs that a step happened, for steps that no other file proves."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from runtime.policy import PolicyId
from runtime.rundir import atomic
from runtime.rundir.layout import RunRoot


class Receipt(BaseModel):
    """What happened, and at which policy; whether it stands is judged against the chain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    step: str
    """As ``runtime.session.steps`` writes it."""
    epoch: int
    update: int
    time: float
    """Seconds since the Unix epoch by the writer's clock."""
    detail: dict[str, JsonValue] = Field(default_factory=dict)
    """Ids, digests, counts, paths."""

    @property
    def policy(self) -> PolicyId:
        """(epoch, update) it was made at."""
        return PolicyId(self.epoch, self.update)


def write_receipt(root: RunRoot, receipt: Receipt) -> None:
    """Write the receipt of a step, replacing an older one of the same step. Atomic."""
    root.receipts.mkdir(parents=True, exist_ok=True)
    path = root.receipts / f"{receipt.step.replace('/', '-')}.json"
    atomic.write_bytes(path, receipt.model_dump_json(indent=1).encode() + b"\n")


def read_receipt(root: RunRoot, step: str) -> Receipt | None:
    """The newest receipt of a step; None where there is none, or only a damaged one."""
    data = atomic.read_bytes(root.receipts / f"{step.replace('/', '-')}.json")
    if data is None:
        return None
    try:
        return Receipt.model_validate_json(data)
    except ValidationError:
        return None
