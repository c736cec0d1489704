"""How weights travel from trainer to engines.

A transport only moves bytes; the transaction around it (pause, verify, decide, resume) lives in
``runtime.publication.transaction`` and is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.engines.protocol import EngineClient, WeightHash
from runtime.policy import PolicyId

ONLY_SHA256: frozenset[WeightHash] = frozenset({"sha256"})
"""What engines answer unless they say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One engine taking part in a publication."""

    slot: int
    incarnation: str
    client: EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is being published."""

    policy: PolicyId
    num_tensors: int
    num_bytes: int
    path: str | None
    """Folder with safetensors for transports that go through files."""
    digests: Mapping[WeightHash, Mapping[str, str]] = field(
        default_factory=dict[WeightHash, Mapping[str, str]]
    )
    """Of the trainer's own tensors as they leave it: by hash, then by HF name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOutcome:
    """What became of one target; error is None on success."""

    slot: int
    error: str | None
    """Names the transport's session (group or folder) beside what went wrong."""
    elapsed_s: float
    kind: str = "EngineError"
    """Class name of the error; means nothing on success."""


class PublicationTransport(Protocol):
    """Moves one snapshot to a set of engines."""

    name: str
    brings_up_one: bool
    """Can bring a single restarted engine up to date (a fixed-size collective cannot)."""

    async def prepare(
        self, policy: PolicyId, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Snapshot:
        """Make the snapshot while engines still serve; the trainer's weights stand still meanwhile.

        ``kinds`` are the hashes that some engine will answer with when it is verified. Asked again
        for the same policy it makes a new one. Raises whatever the trainer or the file system
        raises; engines have not been touched then.
        """
        ...

    async def transfer(
        self, snapshot: Snapshot, targets: Sequence[Target], *, flush: bool, deadline_s: float
    ) -> list[TransferOutcome]:
        """Move it to every target; one outcome each, in order. Never raises for a single engine.

        An engine's HTTP answer is awaited beside the transfer under the one deadline; an error of
        any participant ends the transfer on all sides before this returns. Raises a RunError only
        for the trainer's side.
        """
        ...

    async def release(self, policy: PolicyId) -> None:
        """Drop the snapshot once every engine acknowledged or died; an unknown id is no error."""
        ...

    async def ended(self, slot: int, incarnation: str) -> None:
        """Take note that an incarnation is gone: what it may still have been reading is free."""
        ...

    async def close(self) -> None:
        """Leave groups, delete scratch files."""
        ...
