"""peft's adapter format, as the trainer writes it and the embedded engine reads it.

Legend: O output, I input features of a layer; R rank.

Source: Hu et al. 2021 (LoRA); names and fields of peft.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""In front of the name that the base model gives a module."""
DOWN = ".lora_A.weight"
UP = ".lora_B.weight"


def merge(
    weight_OI: Tensor, *, up_OR: Tensor, down_RI: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """The weight with an adapter added, summed in fp32 and then rounded to ``dtype``.

    Both sides of a publication merge by this function, so that a merged weight that was published
    and an adapter that was merged where it arrived are the same bits.

    Args:
        weight_OI: of the base, as the forward pass reads it.
        up_OR: B; counts rounded to ``dtype``, as the forward pass reads it.
        down_RI: A; the same.
        scale: alpha / rank.
        dtype: of the forward pass.
    """
    up, down = up_OR.to(dtype).float(), down_RI.to(dtype).float()
    return torch.addmm(weight_OI.float(), up, down, alpha=scale).to(dtype)
