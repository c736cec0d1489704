"""Attention over a packed row, as an attention function of transformers.

Projections and MLP run on the row without padding; only here are tokens regrouped to
[sequences, heads, longest, head size], which costs little and lets one causal SDPA call do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.errors import UnavailableFeature
from runtime.trainer.torch.layout import PackedRow

NAME = "milepost_packed"

# Legend: T tokens of the row, H heads, K key/value heads, D head size, S sequences, L longest.


def packed_attention(
    module: torch.nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRow,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each token within its own sequence, prompt shared by siblings.

    Args:
        module: the attention layer; not used.
        query_1HTD: [1, H, T, D]; keys and values [1, K, T, D].
        key_1KTD: see above.
        value_1KTD: see above.
        attention_mask: always None: transformers makes none for a function it does not know.
        packed: passed through the model's keyword arguments.
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: refused; no policy is trained with it.
        sliding_window: refused; ``load`` looks for it first.

    Returns:
        [1, T, H, D], and None where other functions return weights.

    Raises:
        UnavailableFeature: if the model asks for a sliding window or dropout.
    """
    if sliding_window is not None or dropout:
        raise UnavailableFeature(
            "not available yet: sliding-window attention and attention dropout in the trainer"
        )
    heads, head_dim = query_1HTD.shape[1], query_1HTD.shape[3]
    query = _regroup(query_1HTD, packed.row_SL)
    key = _regroup(key_1KTD, packed.row_SL)
    value = _regroup(value_1KTD, packed.row_SL)
    out_SHLD = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != heads
    )
    flat = out_SHLD.transpose(1, 2).reshape(-1, heads * head_dim)
    return flat.index_select(0, packed.slot_T).view(1, -1, heads, head_dim), None


def _regroup(x_1HTD: Tensor, row_SL: Tensor) -> Tensor:
    """[1, H, T, D] -> [S, H, L, D]."""
    _, heads, tokens, head_dim = x_1HTD.shape
    flat = x_1HTD[0].transpose(0, 1).reshape(tokens, heads * head_dim)
    picked = flat.index_select(0, row_SL.flatten())
    return picked.view(*row_SL.shape, heads, head_dim).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
