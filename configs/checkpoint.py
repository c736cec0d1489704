"""`[checkpoint]`: when commits are made, and how many stay."""

from __future__ import annotations

from pydantic import Field

from configs.section import PositiveSeconds, Section


class Checkpoint(Section):
    """Cadence of commits. Boundaries lie between collections; cadences round up to them."""

    every_updates: int = Field(default=50, ge=1)
    """Updates between commits."""
    every_seconds: PositiveSeconds | None = None
    """Also commit when the last one is this old; absent: by updates only."""
    keep: int = Field(default=2, ge=1)
    """Newest commits that stay on disk, beside the pinned ones."""
    upload: str | None = None
    """`s3://bucket/prefix` commits are copied to, and an empty `output.root` is filled from;
    absent: nowhere. Credentials and endpoint come from the environment (`AWS_...`)."""
