"""What a trainer's rank tells of weights it has written, shared or described.

These values travel to the session, whose process has no torch: unpickling one loads this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.engines.shared import SharedBucket

Digest = dict[str, str]
"""By HF name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSnapshot:
    """What lies in a snapshot's folder."""

    num_tensors: int
    num_bytes: int
    """Of the tensors' data, headers not counted."""
    digests: dict[WeightHash, Digest]
    """Of the tensors as they left the trainer, not as read back; by each hash asked for."""

    @property
    def checksums(self) -> Digest:
        """SHA-256 by HF name; KeyError where it was not asked for."""
        return self.digests["sha256"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """What lies in the buckets of one place."""

    num_tensors: int
    num_bytes: int
    """Of the tensors' data."""
    digests: dict[WeightHash, Digest]
    buckets: tuple[SharedBucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a broadcast will carry."""

    digests: dict[WeightHash, Digest]
    buckets: tuple[tuple[TensorSpec, ...], ...]
    """Specs of each bucket, in the order they are sent."""
    num_bytes: int

    @property
    def num_tensors(self) -> int:
        """Tensors of all buckets."""
        return sum(map(len, self.buckets))
