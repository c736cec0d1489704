"""What the files of an evaluation hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from runtime.evaluation.sets import Kind

Mode = Literal["shared", "background"]
SkipReason = Literal[
    "busy", "export_failed", "snapshot_missing", "crashed", "engine_unhealthy", "superseded"
]


class Stored(BaseModel):
    """A file with one writer, which nobody edits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    time: float
    """Seconds since the Unix epoch by the writer's clock."""


class Snapshot(BaseModel):
    """The weights a background evaluation reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    digest: str
    lease: str | None = None
    """Pins the snapshot until the evaluation ended."""


class Request(Stored):
    """What is asked for."""

    run: str
    policy: str
    set: str
    kind: Kind
    required: bool
    mode: Mode
    attempt: int
    epoch: int
    snapshot: Snapshot | None = None
    """None for a shared evaluation: the engines hold the weights."""
    set_digest: str
    sampling: dict[str, JsonValue]
    seed: int

    @property
    def key(self) -> str:
        """Names this evaluation everywhere."""
        return f"{self.run}/{self.policy}/{self.set}"


class Submission(Stored):
    """The claim of one try."""

    key: str
    """Of this try; also Prefect's idempotency key. Its last part is random: a run of the same name
    in another root, or in the same one emptied, shares a server but no keys."""
    by: str
    """Who submits: session, flow, resubmission, a person."""


class Started(Stored):
    """The job runs."""

    host: str
    pid: int
    flow_run: str | None = None
    job: str | None = None


class TryError(BaseModel):
    """Why a try failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error_class: str
    fingerprint: str
    message: str
    counts: dict[str, int] = Field(default_factory=dict)
    """Items done, failed, untried, and failures by error class."""
    is_exempt: bool = False
    """Preempted, interrupted, cancelled or a serving error: never counted as deterministic."""


class Result(Stored):
    """How a try ended."""

    state: Literal["succeeded", "failed", "skipped"]
    reason: SkipReason | None = None
    error: TryError | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    items: str | None = None
    """The items file, relative to the output root."""
    items_sha256: str | None = None
    trainer_update: int | None = None
    """The trainer's update when this was written, where the writer knew it."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if (self.state == "skipped") != (self.reason is not None):
            raise ValueError(f"{self.state} with reason {self.reason}")
        if self.state == "failed" and self.error is None:
            raise ValueError("failed without an error")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """The files of one try; a skip before any submission has a result alone."""

    number: int
    submission: Submission | None
    started: Started | None
    result: Result | None
