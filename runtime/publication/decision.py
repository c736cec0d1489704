"""What a publication decided: the record that closes it, one line of ``publications.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Stage = Literal["prepare", "drain", "pause", "transfer", "verify", "set_policy", "kill", "resume"]


class VerifiedEngine(BaseModel):
    """One engine that holds exactly the trainer's weights and says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: int
    incarnation: str
    pause: str
    """How it was paused: ``in_place``, ``retract`` or ``abort``."""
    flushed: bool
    transfer_s: float = Field(ge=0)


class FailedEngine(BaseModel):
    """One engine that was not verified, or did not go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: int
    incarnation: str
    stage: Stage
    """The stage it failed at."""
    kind: str
    """Class name of the error."""
    error: str
    killed: bool = False
    """It was ended; before any engine resumed, unless ``stage`` is ``resume``."""


class Decision(BaseModel):
    """The outcome of one publication. Frozen; written once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    kind: Literal["publication", "bring_up"]
    epoch: int
    policy: str
    """The policy id that was to be published."""
    previous: str | None
    """The policy published before; it stays so unless ``outcome`` is ``published``."""
    mode: Literal["drain", "refresh", "rolling"]
    transport: str
    outcome: Literal["published", "failed", "abandoned"]
    """``failed``: no engine was verified, none resumed. ``abandoned``: ended from outside."""
    reason: str | None = None
    """Why, unless published."""
    verified: tuple[VerifiedEngine, ...] = ()
    failed: tuple[FailedEngine, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    stages_s: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds per stage that was begun, in order."""
    pause_s: float | None = None
    """From the first pause call to the last resume answer; None when nothing resumed. Of the engine
    that stood longest, in ``rolling``."""
    started_at: float
    """Wall clock, seconds since the Unix epoch."""


def append_decision(path: Path, decision: Decision) -> None:
    """Append one line. No fsync: the chain, not this file, is history.

    Raises:
        OSError: if the file cannot be written.
    """
    line = decision.model_dump_json() + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_decisions(path: Path) -> list[Decision]:
    """Read all complete lines; a torn last line is left out. Empty when the file is missing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Decision.model_validate_json(line) for line in lines[:-1] if line]
