"""Projections that read the same input by one matrix product: q, k and v; gate and up.

They are separate weights of the HF classes and stay so: names, gradients, sharding and exports know
nothing of this. Their concatenation is made when it is used; writing it costs a hundredth of the
product, and one wide product is faster than several narrow ones (q, k, v: 561 against 433-508
TFLOP/s on one H200, 16384 rows of 1024). What follows reads the joint tensor in one kernel
(``rotary``, ``gate``): a compiler splits it and joins the gradients again, at a greater cost than
the product gains.

A pass without a gradient saves that copy: weights that lie one after another are read as the one
they are (``join_weights``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runtime.trainer.torch.attention import packed_attention
from runtime.trainer.torch.cute import takes_product
from runtime.trainer.torch.gate import gated, gated_product
from runtime.trainer.torch.layout import PackedRow
from runtime.trainer.torch.long import ALIGNMENT
from runtime.trainer.torch.rotary import rotate_qkv

# Legend: T tokens of the row, H heads, K key/value heads, E head size, W = (H + 2 K) E.

_MLP = frozenset({"LlamaMLP", "Qwen2MLP", "Qwen3MLP"})
_ATTENTION = frozenset({"LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"})


def fuse_projections(model: nn.Module, *, takes_cute: bool = False) -> int:
    """Let attention blocks of known classes run with a joint projection and ``rotate_qkv``.

    Only for a model whose attention is ``packed_attention``.

    Args:
        model: changed in place.
        takes_cute: the gated activation is part of the product before it (``cute``).

    Returns:
        Number of blocks changed; 0 for an architecture not known here, or a head size that is no
        power of two: those run as they came.
    """
    made: dict[type[nn.Module], type[nn.Module]] = {}
    changed = 0
    for module in model.modules():
        kind = type(module)
        body = _body(module)
        if body is None:
            continue
        if kind not in made:
            # A class, not a method of each instance: one compiled graph serves all layers.
            members = {"forward": body, "joint_weight": None}
            made[kind] = type(f"Joint{kind.__name__}", (kind,), members)
        block: Any = module
        block.__class__ = made[kind]
        block.takes_cute = takes_cute  # of the instance: graphs go by what is said there
        changed += 1
    return changed


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    packed: PackedRow,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the Llama kind, with or without norms of queries and keys."""
    layers = (self.q_proj, self.k_proj, self.v_proj)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    joint_TW = linear(hidden_states.squeeze(0), _weight(self, layers), bias)
    cos_1TE, sin_1TE = position_embeddings
    norms = (self.q_norm, self.k_norm) if hasattr(self, "q_norm") else None
    query_THE, key_TKE, value_TKE = rotate_qkv(
        joint_TW,
        None if norms is None else norms[0].weight,
        None if norms is None else norms[1].weight,
        cos_1TE.squeeze(0),
        sin_1TE.squeeze(0),
        self.q_proj.out_features // self.head_dim,
        0.0 if norms is None else norms[0].variance_epsilon,
    )
    out_1THE, _weights = packed_attention(
        self,
        query_THE[None].transpose(1, 2),
        key_TKE[None].transpose(1, 2),
        value_TKE[None].transpose(1, 2),
        attention_mask,
        packed=packed,
        scaling=self.scaling,
        dropout=self.attention_dropout if self.training else 0.0,
    )
    return self.o_proj(out_1THE.flatten(2)), None


def _mlp(self: Any, x: Tensor) -> Tensor:
    """A gated MLP with silu."""
    weight = _weight(self, (self.gate_proj, self.up_proj))
    if self.takes_cute and takes_product(weight):
        inner_TI, _ = gated_product(x.squeeze(0), weight, torch.is_grad_enabled())
    else:
        inner_TI = gated(linear(x.squeeze(0), weight))
    return self.down_proj(inner_TI).unsqueeze(0)


def join_weights(model: nn.Module, *, may_move: bool) -> int:
    """Give blocks of ``fuse_projections`` their joint weight, for passes without a gradient.

    For whole weights, in the dtype and on the device where they stay; before layers are compiled.

    Args:
        model: trained or only scored.
        may_move: the data of weights that do not lie one after another may move; nobody may have
            kept views of them.

    Returns:
        Number of joint weights.
    """
    count = 0
    for module in model.modules():
        if not hasattr(type(module), "joint_weight"):
            continue
        block: Any = module
        layers: tuple[nn.Linear, ...] = (
            (block.q_proj, block.k_proj, block.v_proj)
            if hasattr(block, "q_proj")
            else (block.gate_proj, block.up_proj)
        )
        # A bias would lie between them, or a gap for the sake of alignment.
        if any(x.bias is not None or x.weight.numel() % ALIGNMENT for x in layers):
            continue
        weights = [layer.weight for layer in layers]
        if may_move and not _are_neighbours(weights):
            rows = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, rows.split([len(w) for w in weights]), strict=True):
                weight.data = part
        if _are_neighbours(weights):
            first = weights[0].detach()
            shape = (sum(len(weight) for weight in weights), first.shape[1])
            block.joint_weight = first.as_strided(shape, first.stride(), first.storage_offset())
            count += 1
    return count


def _are_neighbours(weights: Sequence[Tensor]) -> bool:
    """Each begins where the one before it ends, in one piece of memory."""
    return all(
        a.is_contiguous()
        and b.is_contiguous()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        for a, b in pairwise(weights)
    )


def _weight(block: Any, layers: Sequence[nn.Linear]) -> Tensor:
    """The joint weight: as it lies where that is known and no gradient is wanted."""
    if block.joint_weight is not None and not torch.is_grad_enabled():
        return block.joint_weight
    return torch.cat([layer.weight for layer in layers])


def _body(module: Any) -> Callable[..., Any] | None:
    """The joint form of a block; None for one that has none."""
    name = type(module).__name__
    if name in _ATTENTION and not module.head_dim & (module.head_dim - 1):
        return _attention
    if name in _MLP and module.gate_proj.bias is None and module.config.hidden_act == "silu":
        return _mlp
    return None
