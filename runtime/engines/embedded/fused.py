"""One decode step of the Llama and Qwen families, written out.

Why it exists: for the laptop's model a whole step of the decoder takes 1.51 / 1.85 / 2.35 / 3.20 /
5.27 ms through HF's modules for 8 / 32 / 64 / 128 / 256 rows, and 0.86 / 1.16 / 1.56 / 2.33 / 4.04
ms through this (medians of 9, interleaved, one core, nearly quiet): with so small a model the
modules' own overhead is the larger part until the batch is large. It is compared with HF's forward
when it is made, and by a test to 1e-5; every other model takes HF's forward.

Suffixes: B rows, L attended positions, H heads, K KV heads, G = H / K, D head size, C hidden size.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engines.embedded.cache import SlotCache
from runtime.engines.embedded.forward import HfForward, attention_mask

_MODELS = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3"}
_TOLERANCE = 1e-4
"""Largest difference of logits from HF's at which the step is trusted; seen: 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    norm_q: Tensor | None
    norm_k: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class FusedDecode:
    """A decode step over fused projections; the model's parameters become views into them.

    So a weight update that copies into the model's parameters needs no second step here.
    """

    def __init__(self, model: Any, slots: SlotCache, *, max_length: int) -> None:
        config = model.config
        self._slots = slots
        self._eps = float(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._layers = [_fuse(layer) for layer in model.model.layers]
        self._dim = slots.keys.shape[-1]
        self._embedding: Tensor = model.model.embed_tokens.weight
        self._norm: Tensor = model.model.norm.weight
        self._head: Tensor = model.lm_head.weight
        position_1L = torch.arange(max_length).unsqueeze(0)
        cos, sin = model.model.rotary_emb(self._embedding[:1], position_1L)
        # rotate_half(x) * sin == roll(x, D/2) * sin with the first half's sign turned.
        sign_D = torch.ones(self._dim)
        sign_D[: self._dim // 2] = -1.0
        self._cos_LD: Tensor = cos[0]
        self._sin_LD: Tensor = sin[0] * sign_D

    def __call__(self, token_B: Tensor, position_B: Tensor, length: int) -> Tensor:
        """Logits [B, V]; see ``forward.Decode``."""
        num_rows = len(token_B)
        row_B = torch.arange(num_rows)
        cos_B1D = self._cos_LD[position_B].unsqueeze(1)
        sin_B1D = self._sin_LD[position_B].unsqueeze(1)
        mask_B11L = attention_mask(position_B, length, torch.float32).view(num_rows, 1, 1, length)
        x_BC = F.embedding(token_B, self._embedding)
        for index, layer in enumerate(self._layers):
            q_BHD, k_BKD, v_BKD = self._project(layer, x_BC, cos_B1D, sin_B1D)
            keys, values = self._slots.keys[index], self._slots.values[index]
            keys[row_B, :, position_B] = k_BKD
            values[row_B, :, position_B] = v_BKD
            # The G query heads of a KV head are rows of one matrix: no repeated keys.
            q_BKGD = q_BHD.view(num_rows, self._kv_heads, -1, self._dim) * self._dim**-0.5
            weight_BKGL = q_BKGD @ keys[:num_rows, :, :length].transpose(-1, -2)
            weight_BKGL = torch.softmax(weight_BKGL.add_(mask_B11L), dim=-1)
            attended_BC = (weight_BKGL @ values[:num_rows, :, :length]).view(num_rows, -1)
            x_BC = x_BC + F.linear(attended_BC, layer.out, layer.out_bias)
            gate, up = F.linear(self._rms(x_BC, layer.norm_mlp), layer.gate_up).chunk(2, dim=-1)
            x_BC = x_BC + F.linear(F.silu(gate).mul_(up), layer.down)
        return F.linear(self._rms(x_BC, self._norm), self._head)

    def _project(
        self, layer: _Layer, x_BC: Tensor, cos_B1D: Tensor, sin_B1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = F.linear(self._rms(x_BC, layer.norm_in), layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(x_BC), -1, self._dim)
        q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        if layer.norm_q is not None and layer.norm_k is not None:
            q, k = self._rms(q, layer.norm_q), self._rms(k, layer.norm_k)
        half = self._dim // 2
        q = q * cos_B1D + q.roll(half, -1) * sin_B1D
        k = k * cos_B1D + k.roll(half, -1) * sin_B1D
        return q, k, v

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)


def fused_decode(
    model: Any, slots: SlotCache, hf: HfForward, *, max_length: int
) -> FusedDecode | None:
    """The written-out step; None for a model that it does not know or where HF disagrees."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if (
        type(model).__name__ not in _MODELS
        or model.dtype != torch.float32
        or config.hidden_act != "silu"
        or getattr(config, "mlp_bias", False)
        or rope.get("rope_type", "default") not in _STATIC_ROPE
    ):
        return None
    slots.reserve(2, 16)
    fused = FusedDecode(model, slots, max_length=max_length)
    token_B, length = torch.tensor([1, int(config.vocab_size) - 1]), 16
    worst = 0.0
    for step in range(3):
        position_B = torch.tensor([step, step])
        expected = hf(token_B, position_B, length)
        worst = max(worst, float((fused(token_B, position_B, length) - expected).abs().max()))
    return fused if worst <= _TOLERANCE else None


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [p.bias for p in projections]
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=_joined([p.weight for p in projections]),
        qkv_bias=None if biases[0] is None else _joined(biases),
        norm_q=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        norm_k=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=_joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )


def _joined(parameters: list[Any]) -> Tensor:
    """Concatenate along the output axis and make each parameter a view of its part."""
    whole = torch.cat([p.data for p in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = whole[at : at + len(parameter)]
        at += len(parameter)
    return whole
