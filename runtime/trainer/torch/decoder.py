"""The layers of a causal model over a packed row, called one after another from here.

What transformers does around them, whole models of all kinds in mind, keeps a GPU waiting before
the first layer of every pass: masks that packed attention has no use for, recorded outputs, a copy
of the list of layers, a rotation computed anew. Models of kinds not known here go that way.

Legend: T tokens of the row, D hidden size, E head size, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.trainer.torch.layout import PackedRow

_KNOWN = frozenset({"LlamaModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"})
"""Embedding, layers, norm, one rotation for all layers, and nothing else in between."""


class Decoder:
    """From a packed row to its last hidden states.

    No module: it has nothing of its own, and parameters keep the names they have in the model.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._rotations: Rotations | None = None
        self.walks = type(base).__name__ in _KNOWN
        """Layers are called from here; False: by the model's own forward pass."""

    def __call__(self, row: PackedRow) -> Tensor:
        """Last hidden states [T, D], normed, with gradients where they are enabled."""
        base = self._base
        token_1T, position_1T = row.token_T[None], row.position_T[None]
        if not self.walks:
            found = base(input_ids=token_1T, position_ids=position_1T, use_cache=False, packed=row)
            return found.last_hidden_state.squeeze(0)
        hidden_1TD = base.embed_tokens(token_1T)
        if self._rotations is None:
            self._rotations = Rotations(base.rotary_emb)
        rotation = self._rotations.of(row, hidden_1TD)
        for layer in base.layers:
            hidden_1TD = layer(
                hidden_1TD,
                attention_mask=None,
                position_embeddings=rotation,
                position_ids=position_1T,
                use_cache=False,
                packed=row,
            )
        return base.norm(hidden_1TD).squeeze(0)


class Rotations:
    """Cosines and sines of all positions met so far, as the model's own module makes them."""

    def __init__(self, rotary_emb: nn.Module) -> None:
        self._make: Any = rotary_emb
        kind = getattr(rotary_emb, "rope_type", "")
        # Those two take the longest position of a call into account.
        self._is_fixed = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        self._cos_PE: Tensor | None = None
        self._sin_PE: Tensor | None = None

    def of(self, row: PackedRow, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, T, E] of a row, on the device and in the dtype of ``like``."""
        if not self._is_fixed:
            return self._make(like, row.position_T[None])
        cos_PE, sin_PE = self._table(row.row_SL.shape[1], like)
        position_T = row.position_T
        return cos_PE.index_select(0, position_T)[None], sin_PE.index_select(0, position_T)[None]

    @torch.no_grad()
    def _table(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cos_PE, sin_PE = self._cos_PE, self._sin_PE
        if (
            cos_PE is None
            or sin_PE is None
            or cos_PE.shape[0] < positions
            or cos_PE.dtype != like.dtype
            or cos_PE.device != like.device
        ):
            size = 1 << (positions - 1).bit_length()  # doubled, so that this is done a few times
            cos_1PE, sin_1PE = self._make(like, torch.arange(size, device=like.device)[None])
            cos_PE, sin_PE = cos_1PE[0].contiguous(), sin_1PE[0].contiguous()
            self._cos_PE, self._sin_PE = cos_PE, sin_PE
        return cos_PE, sin_PE
