"""The JSON beside a rank's tensors: what it holds of which whole."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MASTER = "master"
"""Prefix of a weight's name where its fp32 master is stored; what the optimizer keeps of it stands
under prefixes of its own: ``exp_avg`` and ``exp_avg_sq``, or ``momentum``."""
RNG_CPU = "rng.cpu"
RNG_CUDA = "rng.cuda"


class RowSlice(BaseModel):
    """Where a rank's rows of one tensor lie in the whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First row; a rank without rows has no tensor in its file."""


class RankRecord(BaseModel):
    """The JSON beside a rank's tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    rank: int
    world_size: int
    update: int
    consumed_digest: str
    optimizer_steps: int
    skipped_steps: int
    slices: dict[str, RowSlice]
    base_digest: str | None = None
    """Of the frozen base, where only adapters are stored; said by rank 0. None: all weights are
    stored, or another rank says it."""
