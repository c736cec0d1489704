"""What travels to a scheduler: the frozen run, and nothing of the submitter's."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.names import is_owned
from configs.plan import Plan
from configs.run import RunSpec
from runtime.errors import ConfigError
from runtime.rundir.attempt import AttemptFile, Claim

PAYLOAD_VARIABLE = "MILEPOST_SUBMISSION"
"""Holds the payload in the job's environment."""
CODE_VARIABLE = "MILEPOST_CODE_TRAVELS"
"""Set where the job's working folder holds the code, and no image does."""
ENTRY = "runtime.launch.entry"
"""Module that a job starts."""
_NOT_A_NAME = re.compile(r"[^a-z0-9-]+")
_LONGEST_NAME = 40
_MARK = 16


class Payload(BaseModel):
    """Everything a job needs to begin an attempt, in one environment variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    root: Path
    """The output root, as the job sees it."""
    attempt: int
    run: str
    """The resolved run file, JSON."""
    plan: str
    """The plan, JSON."""
    order: AttemptFile
    claim: Claim
    """The launcher's; written by the job where the launcher could not reach the root."""

    def encode(self) -> str:
        """Short and without quotes: it goes through shells and YAML."""
        return base64.b64encode(zlib.compress(self.model_dump_json().encode(), 9)).decode()

    @classmethod
    def decode(cls, text: str) -> Payload:
        """Read it back.

        Raises:
            ConfigError: if it is none, or of another version.
        """
        try:
            return cls.model_validate_json(zlib.decompress(base64.b64decode(text, validate=True)))
        except (ValueError, zlib.error, ValidationError) as error:
            raise ConfigError(
                f"{PAYLOAD_VARIABLE} cannot be read by the code of this image: submit again with "
                "an image of the same version"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One attempt, ready to be sent by any backend."""

    spec: RunSpec
    plan: Plan
    payload: Payload
    image: str | None
    """By digest or scheduler id; None: the code travels as files, or lies there already."""

    @property
    def key(self) -> str:
        """Names the attempt at the scheduler: run, output root and attempt number."""
        return attempt_key(self.spec.name, self.payload.root, self.payload.attempt)

    @property
    def mark(self) -> str:
        """What runs, in one word: the beginnings of its spec digest and training digest.

        It stands on the job, so that whoever finds one under our name knows whether it is ours.
        """
        claim = self.payload.claim
        return f"{claim.spec_digest[:_MARK]}.{claim.training_digest[:_MARK]}"

    def environment(self) -> dict[str, str]:
        """The job's plain environment: the cluster's own, the run file's, and the payload.

        Where a secret has the same name it wins, so that one is left out.
        """
        spec = self.spec.launch
        named = {**self.plan.environment, **spec.env}
        kept = {name: value for name, value in named.items() if name not in spec.secrets}
        return {**kept, PAYLOAD_VARIABLE: self.payload.encode()}


def attempt_key(run: str, root: Path, attempt: int) -> str:
    """Deterministic: the same attempt is found under it after a lost answer.

    Two runs of one name differ by their roots.
    """
    name = _NOT_A_NAME.sub("-", run.lower()).strip("-")[:_LONGEST_NAME] or "run"
    return f"{name}-{hashlib.sha256(str(root).encode()).hexdigest()[:8]}-a{attempt}"


def owned_names(environment: Mapping[str, str]) -> list[str]:
    """Names in a job's environment that belong to the launcher, sorted."""
    return sorted(name for name in environment if is_owned(name))


def canonical_json(document: object) -> str:
    """The bytes of a rendered document: the library call's and ``plan --render``'s are the same."""
    return json.dumps(document, indent=2, sort_keys=False, ensure_ascii=False)
