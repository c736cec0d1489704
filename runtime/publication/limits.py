"""How long each stage of a publication may take."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from runtime.waits import stretched

BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationLimits:
    """Seconds each stage may take, for all engines together. Each names its own WaitTimeout."""

    prepare_s: float = 600.0
    """Export of the weights while engines still serve, and the engines' facts."""
    drain_s: float = 1800.0
    """Running requests to end, in ``drain`` mode."""
    pause_s: float = 60.0
    """Every engine to stop decoding."""
    transfer_s: float = 600.0
    """All buckets, the engines' answers included; no longer than a trainer collective."""
    verify_s: float = 120.0
    """Checksums of all weights from every engine."""
    set_policy_s: float = 30.0
    """The policy id set and read back."""
    kill_s: float = 60.0
    """The engines that were not verified to be gone."""
    resume_s: float = 30.0
    """Verified engines to decode again."""

    def stretched(self) -> Self:
        """Stretch every limit by MILEPOST_INFRA_TIMEOUT_MULTIPLIER; ConfigError if malformed."""
        longer = {
            f.name: stretched(
                "drain" if f.name == "drain_s" else "publication", getattr(self, f.name)
            )
            for f in fields(self)
        }
        return replace(self, **longer)
