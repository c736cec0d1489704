"""The loss table: what each `core.loss` means cell by cell. Every cell can be set on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "reinforce"]
Ratio = Literal["token", "sequence", "none"]
Aggregation = Literal["sample", "token", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One settled loss: nothing left to default."""

    ratio: Ratio
    """`token`; `sequence`: mean of the log-ratio, the same for each token; `none`: no ratio."""
    normalize_std: bool
    """Divide the centred reward by the group's standard deviation."""
    aggregation: Aggregation
    """`sample`: token mean per sample, mean over samples; `token`: mean over active tokens;
    `constant`: token sum over (samples x max_response_tokens)."""
    eps_clip: float | None
    """The ratio is clipped below at 1 - eps_clip; None without a ratio."""
    eps_clip_high: float | None
    """The ratio is clipped above at 1 + eps_clip_high; None without a ratio."""


LOSSES: dict[LossName, LossRow] = {
    "grpo": LossRow(
        ratio="token", normalize_std=True, aggregation="sample", eps_clip=0.2, eps_clip_high=0.2
    ),
    "dr_grpo": LossRow(
        ratio="token", normalize_std=False, aggregation="constant", eps_clip=0.2, eps_clip_high=0.2
    ),
    "dapo": LossRow(
        ratio="token", normalize_std=True, aggregation="token", eps_clip=0.2, eps_clip_high=0.28
    ),
    "gspo": LossRow(
        ratio="sequence",
        normalize_std=True,
        aggregation="sample",
        eps_clip=3e-4,
        eps_clip_high=4e-4,
    ),
    "reinforce": LossRow(
        ratio="none", normalize_std=False, aggregation="token", eps_clip=None, eps_clip_high=None
    ),
}
"""Source: Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Yu et al. 2025 (DAPO), Zheng et al.
2025 (GSPO), Williams 1992 (REINFORCE)."""
