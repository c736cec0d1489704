"""The one adapter an engine may serve: checked whole, then merged into the weights it decodes with.

Only its bytes travel, decoding costs nothing more, and what is served is bit by bit what a merged
publication would have brought. The base is kept beside, for the next adapter and for none.

Legend: O output, I input features of a layer; R rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from runtime.engines.embedded.weights import Weights, WeightsRefused
from runtime.publication.checksum import checksums
from runtime.publication.peft import CONFIG, DOWN, PREFIX, UP, WEIGHTS, merge

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",), "fan_in_fan_out": (False,), "lora_bias": (False,), "use_dora": (False,),
    "use_rslora": (False,), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "layer_replication": (None,), "trainable_token_indices": (None,),
}  # fmt: skip
"""Fields of the format that change what an adapter computes, with the values that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checked adapter in this process's own memory; nothing of the engine has changed for it."""

    path: str
    scale: float
    """alpha / rank; finite."""
    parts: dict[str, Tensor]
    """By the format's names, as the file has them."""
    layers: dict[str, tuple[Tensor, Tensor]]
    """(B [O, R], A [R, I]) by the weight they are added to."""
    whole: dict[str, Tensor]
    """Weights it replaces, by HF name; tied ones under each of their names."""


class AdapterSlot:
    """What is loaded over a model's base. ``load`` and ``unload`` run between two steps."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._base: dict[str, Tensor] = {}
        """Copies of the weights that the loaded adapter changed."""
        self._adapter: Adapter | None = None
        self.name: str | None = None
        """Of the loaded adapter; None: the base serves."""

    @property
    def path(self) -> str | None:
        """Folder the loaded adapter was read from."""
        return None if self._adapter is None else self._adapter.path

    def read(self, path: str) -> Adapter:
        """Read an adapter and check it against the model.

        Raises:
            WeightsRefused: if the folder holds none, or one that this model or engine cannot take.
        """
        rank, scale = _rank_and_scale(Path(path))
        parts = _tensors(Path(path))
        adapter = Adapter(path=path, scale=scale, parts=parts, **_sorted_out(parts))
        for name, (up_OR, down_RI) in adapter.layers.items():
            weight_OI = self._weights.linear(name)
            shapes = (up_OR.shape[0], down_RI.shape[1]), (up_OR.shape[1], down_RI.shape[0])
            if shapes != (tuple(weight_OI.shape), (rank, rank)):
                raise WeightsRefused(
                    f"{name}: an adapter of {list(up_OR.shape)} x {list(down_RI.shape)} does not "
                    f"fit {list(weight_OI.shape)} at rank {rank}"
                )
        if adapter.whole:
            self._weights.check(adapter.whole, whole=False)
        if both := adapter.layers.keys() & self._replaced(adapter):
            raise WeightsRefused(f"{min(both)} has an adapter and is replaced too")
        return adapter

    @torch.no_grad()
    def load(self, name: str, adapter: Adapter) -> None:
        """Serve the base with this adapter, in place of the one before."""
        wanted = adapter.layers.keys() | self._replaced(adapter)
        for left in self._base.keys() - wanted:
            self._weights.named(left).copy_(self._base.pop(left))
        for weight_name in wanted - self._base.keys():
            self._base[weight_name] = self._weights.named(weight_name).clone()
        for weight_name in adapter.layers:
            self._weights.named(weight_name).copy_(self._merged(adapter, weight_name))
        self._weights.copy(adapter.whole)
        self.name, self._adapter = name, adapter

    @torch.no_grad()
    def unload(self) -> None:
        """Serve the base alone."""
        self._weights.copy(self._base)
        self._base.clear()
        self.name, self._adapter = None, None

    def checksums(self) -> dict[str, str]:
        """Checksum of the base by HF name, and of the adapter by the format's names.

        A weight that the adapter replaces stands under the format's name alone.

        Raises:
            WeightsRefused: if what is served is not the base with the adapter.
        """
        adapter = self._adapter
        if adapter is None:
            return self._weights.checksums()
        for name in adapter.layers:
            if not torch.equal(self._weights.named(name), self._merged(adapter, name)):
                raise WeightsRefused(f"{name} is not its base with the adapter {self.name}")
        for name, tensor in adapter.whole.items():
            served = self._weights.named(name)
            if not torch.equal(served, tensor.to(served.dtype)):
                raise WeightsRefused(f"{name} is not the one of the adapter {self.name}")
        replaced = self._replaced(adapter)
        base = {name: self._base[name] for name in adapter.layers}
        held = (
            (name, base.get(name, tensor))
            for name, tensor in self._weights.unique()
            if name not in replaced
        )
        return checksums(held) | checksums(adapter.parts.items())

    def _replaced(self, adapter: Adapter) -> set[str]:
        """Weights that it replaces, tied ones under their first name."""
        return {self._weights.first_name(name) for name in adapter.whole}

    def _merged(self, adapter: Adapter, name: str) -> Tensor:
        base_OI = self._base[name]
        up_OR, down_RI = adapter.layers[name]
        return merge(
            base_OI, up_OR=up_OR, down_RI=down_RI, scale=adapter.scale, dtype=base_OI.dtype
        )


def _rank_and_scale(folder: Path) -> tuple[int, float]:
    """Rank, and alpha / rank, of the folder's adapter; WeightsRefused for what is not plain LoRA.

    No checksum covers the file that says so: the rank is held to the tensors', the rest to reason.
    """
    file = folder / CONFIG
    try:
        fields: Mapping[str, Any] = json.loads(file.read_bytes())
        kind, rank = fields["peft_type"], int(fields["r"])
        scale = float(fields["lora_alpha"]) / rank
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise WeightsRefused(f"cannot read {CONFIG} in {str(folder)!r}: {error!r}") from error
    if kind != "LORA":
        raise WeightsRefused(f"peft_type {kind!r:.80} is not supported: this engine takes LORA")
    if rank < 1 or not math.isfinite(scale):
        raise WeightsRefused(f"r = {rank} with alpha / r = {scale} is no adapter")
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            raise WeightsRefused(f"{name} = {fields[name]!r:.80} is not supported by this engine")
    return rank, scale


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Copies of what the folder's file holds: the file may be written over once this returns."""
    try:
        tensors = {n: t.clone() for n, t in load_file(folder / WEIGHTS).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsRefused(f"cannot read {WEIGHTS} in {str(folder)!r}: {error}") from error
    if not tensors:
        raise WeightsRefused(f"{WEIGHTS} in {str(folder)!r} holds no tensors")
    return tensors


def _sorted_out(parts: Mapping[str, Tensor]) -> dict[str, Any]:
    """``layers`` and ``whole`` of an adapter; WeightsRefused where names or ranks do not pair."""
    halves: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in parts.items():
        if not name.startswith(PREFIX):
            raise WeightsRefused(f"{name!r} is no name of peft's: they begin with {PREFIX!r}")
        own = name.removeprefix(PREFIX)
        end = next((end for end in (DOWN, UP) if own.endswith(end)), None)
        if end is None:
            whole[own] = tensor
            continue
        if tensor.dim() != 2:
            raise WeightsRefused(f"{name!r} is no matrix but {list(tensor.shape)}")
        halves.setdefault(f"{own.removesuffix(end)}.weight", {})[end] = tensor
    single = next((name for name, pair in halves.items() if len(pair) < 2), None)
    if single is not None:
        raise WeightsRefused(f"{single} has one half of an adapter only")
    return {"layers": {n: (pair[UP], pair[DOWN]) for n, pair in halves.items()}, "whole": whole}
