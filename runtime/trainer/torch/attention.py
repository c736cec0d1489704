"""Attention over a packed row, as an attention function of transformers.

Projections and MLP run on the row without padding. With kernels of ``cute`` attention does too
(``flash``). Otherwise a row of equally long sequences is looked at as [sequences, heads, longest,
head size], and others are regrouped to that, so that one causal SDPA call does; where that would be
mostly padding, torch's variable-length kernel takes the row as it is (``layout.choose_shape``).
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from runtime.errors import UnavailableFeature
from runtime.trainer.torch.context import to_heads, to_tokens
from runtime.trainer.torch.flash import flash
from runtime.trainer.torch.layout import PackedRow

NAME = "milepost_packed"

# Older versions take fewer key/value heads without being told.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

# Legend: T tokens of the row, H heads, K key/value heads, D head size, S sequences, L longest.
# Where ranks share the row, a layer has some tokens and all heads, attention the other way round.


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
    if packed.part is None:
        return _attend(query_1HTD, key_1KTD, value_1KTD, packed, scaling), None
    query, key, value = to_heads(packed.part, query_1HTD, key_1KTD, value_1KTD)
    return to_tokens(packed.part, _attend(query, key, value, packed, scaling)), None


def _attend(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    packed: PackedRow,
    scaling: float | None,
) -> Tensor:
    """[1, T, H, D] of a whole row, in the shape that was chosen for it."""
    heads, head_dim = query_1HTD.shape[1], query_1HTD.shape[3]
    is_whole = packed.kernel == "cute" and packed.shape == "rectangular"
    if is_whole or packed.shape == "ragged":
        scale = head_dim**-0.5 if scaling is None else scaling
        return _as_it_lies(query_1HTD, key_1KTD, value_1KTD, packed, scale)
    group = _view if packed.shape == "rectangular" else _regroup
    query = group(query_1HTD, packed.row_SL)
    key = group(key_1KTD, packed.row_SL)
    value = group(value_1KTD, packed.row_SL)
    out_SHLD = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != heads
    )
    flat = out_SHLD.transpose(1, 2).reshape(-1, heads * head_dim)
    if packed.shape == "padded":
        flat = flat.index_select(0, packed.slot_T)
    return flat.view(1, -1, heads, head_dim)


def _as_it_lies(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    packed: PackedRow,
    scale: float,
) -> Tensor:
    """[1, T, H, D] of a row that is not regrouped; queries are the last ones of their sequence."""
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    if packed.key_K.shape[0]:
        key, value = key.index_select(0, packed.key_K), value.index_select(0, packed.key_K)
    longest = packed.row_SL.shape[1]
    if packed.kernel == "cute":
        out, _ = flash(query, key, value, packed.query_ends_S1, packed.key_ends_S1, longest, scale)
        return out[None]
    out = varlen_attn(
        query, key, value, packed.query_ends_S1, packed.key_ends_S1, longest, longest,
        scale=scale, window_size=(-1, 0), **_GROUPED_HEADS,
    )  # fmt: skip
    return cast("Tensor", out)[None]


def _view(x_1HTD: Tensor, row_SL: Tensor) -> Tensor:
    """[1, H, T, D] -> [S, H, L, D] where the row is its sequences, one after another."""
    _, heads, _, head_dim = x_1HTD.shape
    # Not x[0]: the backward pass of picking writes a new tensor, that of squeezing is a view.
    return x_1HTD.squeeze(0).transpose(0, 1).view(*row_SL.shape, heads, head_dim).transpose(1, 2)


def _regroup(x_1HTD: Tensor, row_SL: Tensor) -> Tensor:
    """[1, H, T, D] -> [S, H, L, D]."""
    _, heads, tokens, head_dim = x_1HTD.shape
    flat = x_1HTD.squeeze(0).transpose(0, 1).reshape(tokens, heads * head_dim)
    picked = flat.index_select(0, row_SL.flatten())
    return picked.view(*row_SL.shape, heads, head_dim).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
