"""The model as the decoder sees it: read prompts, take one step, score a text.

Suffixes: P prompts, T padded length, B rows in use, V vocabulary, U distinct prompt lengths.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.engines.embedded.cache import DecodeCache, PrefillCache, Prefilled, SlotCache
from runtime.errors import UnavailableFeature


class Decode(Protocol):
    """One decode step for all slots in use."""

    def __call__(self, token_B: Tensor, position_B: Tensor, length: int) -> Tensor:
        """Logits [B, V] after ``token_B`` at ``position_B``, attending to ``length`` positions."""
        ...


class HfForward:
    """Any HF causal LM with full attention in every layer, run through its own ``forward``."""

    def __init__(self, model: Any, slots: SlotCache) -> None:
        self._model = model
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._cache = DecodeCache(slots, self._num_layers)
        # Renamed upstream in 5.2x; both ends of our supported range must work.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._dtype: torch.dtype = model.dtype

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Prefilled]:
        """Read whole prompts.

        Returns:
            float32 logits [P, V] at the last token of each, and the KV of all.
        """
        length_P = torch.tensor([len(p) for p in prompts])
        ids_PT = _padded(prompts, int(length_P.max()))
        last_U, which_P = torch.unique(length_P - 1, return_inverse=True)
        cache = PrefillCache(self._num_layers)
        logits_PUV = self._run(ids_PT, cache, logits_to_keep=last_U)
        logits_PV = logits_PUV[torch.arange(len(prompts)), which_P]
        return logits_PV.float(), cache.prefilled()

    def score(self, ids: Sequence[int]) -> Tensor:
        """float32 log-probs [T - 1, V] at tokens 1.. given those before, at temperature 1."""
        ids_1T = torch.tensor([ids])
        logits_1TV = self._run(ids_1T, PrefillCache(self._num_layers))
        return torch.log_softmax(logits_1TV[0, :-1].float(), dim=-1)

    def __call__(self, token_B: Tensor, position_B: Tensor, length: int) -> Tensor:
        """One decode step; see ``Decode``."""
        mask_B11L = attention_mask(position_B, length, self._dtype).view(len(token_B), 1, 1, length)
        self._cache.aim(torch.arange(len(token_B)), position_B, length)
        out = self._model(
            input_ids=token_B.unsqueeze(1),
            attention_mask=mask_B11L,
            position_ids=position_B.unsqueeze(1),
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        return out.logits[:, -1].float()

    def _run(self, ids_PT: Tensor, cache: PrefillCache, **kwargs: Any) -> Tensor:
        num_prompts, length = ids_PT.shape
        # Padding is on the right, so the causal mask alone keeps real tokens from seeing it.
        mask_TT = attention_mask(torch.arange(length), length, self._dtype)
        out = self._model(
            input_ids=ids_PT,
            attention_mask=mask_TT.expand(num_prompts, 1, length, length),
            position_ids=torch.arange(length).expand(num_prompts, -1),
            use_cache=True,
            **{self._cache_name: cache},
            **kwargs,
        )
        return out.logits


def attention_mask(position_B: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, length]: 0 up to each row's position, the dtype's minimum after it."""
    hidden_BL = torch.arange(length) > position_B.unsqueeze(1)
    return torch.zeros(len(position_B), length, dtype=dtype).masked_fill_(
        hidden_BL, torch.finfo(dtype).min
    )


def _padded(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return ids


def load_model(path: str | Path, dtype: str) -> Any:
    """Load a causal LM from a local folder, in eval mode, without gradients.

    Raises:
        UnavailableFeature: if a layer is not full attention (sliding windows, linear attention).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnavailableFeature(
            f"not available yet: the embedded engine with layers of kind {sorted(kinds)}; "
            "it knows full attention only",
            model=str(path),
        )
    return model.eval().requires_grad_(False)


def slot_cache(model: Any) -> SlotCache:
    """An empty slot cache of the model's shape."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    return SlotCache(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=model.dtype,
    )
