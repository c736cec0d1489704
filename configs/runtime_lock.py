"""`runtime.lock.json`: which base, packages, features and entry points an image must have."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

LOCK_FILE = Path(__file__).parent / "runtime.lock.json"
_BASE = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class LockedBase(BaseModel):
    """The base image, by identities that cannot come to mean another one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    """``registry/name@sha256:...``; of an index, the platform chooses in it."""
    beaker: str | None = None
    """Id of the same image on Beaker; None where it was never registered there."""

    @field_validator("reference")
    @classmethod
    def _is_immutable(cls, reference: str) -> str:
        if _BASE.fullmatch(reference) is None:
            raise ValueError(f"{reference!r}: the base is locked as registry/name@sha256:...")
        return reference

    @property
    def digest(self) -> str:
        """``sha256:...``."""
        return self.reference.rpartition("@")[2]


class RuntimeLock(BaseModel):
    """What the runtime of a job consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    base: LockedBase | None
    """None: no base was chosen yet, and nothing can be built."""
    platform: str = Field(pattern=r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?")
    """``linux/amd64``."""
    packages: dict[str, str]
    """Distribution -> version that the job must find installed."""
    features: tuple[str, ...]
    """What a preset may ask for in ``launch.requires``."""
    entry_points: dict[str, str]
    """Name -> module that is run in a job."""

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical form: layout and comments of the file do not count."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def read_lock(path: Path = LOCK_FILE) -> RuntimeLock:
    """Read a lock.

    Raises:
        OSError: if the file cannot be read.
        ValidationError: if it is no lock.
    """
    return RuntimeLock.model_validate_json(path.read_bytes())


def is_digest(text: str) -> bool:
    """The text is ``sha256:`` and 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None
