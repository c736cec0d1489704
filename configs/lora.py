"""`[lora]`: adapters instead of full weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Section, Texts


class Lora(Section):
    """Low-rank adapters; the base stays as it is and serves as the reference policy."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 is off."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: adapters count alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in front of the adapters."""
    targets: Texts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get one."""
    also: Texts = ()
    """Weights that train whole beside the adapters, by name with `*`, such as `"*embed_tokens*"`:
    peft's `modules_to_save`. With any, the base no longer serves as the reference, which is then
    loaded apart."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines get: full weights, or the adapter in peft's format, which the embedded engine
    merges itself: only its bytes travel."""
    export: Literal["merged", "adapter"] = "merged"
    """What the HF export holds."""

    @property
    def publishes_adapter(self) -> bool:
        """Engines get adapters over the base they started with."""
        return self.rank > 0 and self.publish == "adapter"
