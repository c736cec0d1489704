"""What a run and a commit must have in common for the one to go on from the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from runtime.rundir.records import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Digests of the run file and the data; goes into every commit record."""

    training_digest: str
    layout: Mapping[str, JsonValue]
    """Parallel sizes, backend, engine counts: may change where the backend can reshard."""
    data_fingerprint: str


def differences(commit: CommitRecord, identity: RunIdentity) -> tuple[str, ...]:
    """Name what keeps a run from resuming a commit; the layout is not among it."""
    found: list[str] = []
    if commit.training_digest != identity.training_digest:
        found.append("training digest")
    if commit.data_fingerprint != identity.data_fingerprint:
        found.append("data fingerprint")
    return tuple(found)
