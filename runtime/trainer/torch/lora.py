"""Low-rank adapters on a model's linear layers, and the two forms in which they leave the trainer.

The base stays as it was loaded. An adapter adds ``scale x B A`` to a weight, B = 0 at first, so
training begins at the base, which is also the reference policy: adapters count 0 then.

Legend: O output, I input features of a layer; R rank.

Source: Hu et al. 2021 (LoRA); file format of peft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout, linear

from runtime.errors import ConfigError
from runtime.publication.peft import CONFIG, DOWN, PREFIX, UP, merge
from runtime.rundir.atomic import disk_full_as_error
from runtime.trainer.settings import LoraSettings


class LoraLinear(nn.Linear):
    """A linear layer whose frozen weight has an adapter; made of a plain one by ``adapt``."""

    lora_A: nn.Parameter
    """[R, I]"""
    lora_B: nn.Parameter
    """[O, R]"""
    lora_scale: Tensor
    """alpha / rank, or 0 while the base alone counts: a tensor, which a compiled graph reads anew.
    """
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        """The layer with its adapter. Dropout only where a gradient is made, not in scoring."""
        base = super().forward(input)
        drops = self.lora_dropout > 0 and torch.is_grad_enabled()
        seen = dropout(input, self.lora_dropout) if drops else input
        return base + linear(linear(seen, self.lora_A), self.lora_B) * self.lora_scale


def adapt(model: nn.Module, settings: LoraSettings, *, seed: int) -> int:
    """Freeze the model and give its targets adapters; the same ones for the same seed.

    Returns:
        Number of layers that have one.

    Raises:
        ConfigError: if a target names no linear layer of the model.
    """
    for name, param in model.named_parameters():
        param.requires_grad_(settings.trains_whole(name))
    made = torch.Generator().manual_seed(seed)
    missing = set(settings.targets)
    count = 0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if type(module) is not nn.Linear or last not in settings.targets:
            continue
        missing.discard(last)
        count += 1
        bound = 1.0 / math.sqrt(module.in_features)
        down = torch.empty(settings.rank, module.in_features).uniform_(
            -bound, bound, generator=made
        )
        # A class of its own in place of a wrapper: names of weights stay those of the model.
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        module.lora_A = nn.Parameter(down)
        module.lora_B = nn.Parameter(torch.zeros(module.out_features, settings.rank))
        module.register_buffer("lora_scale", torch.tensor(settings.scale), persistent=False)
        module.lora_dropout = settings.dropout
    if missing:
        raise ConfigError(
            f"lora.targets: the model has no linear layer named {', '.join(sorted(missing))}",
            targets=sorted(missing),
        )
    return count


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Layers with an adapter, by the name of their weight."""
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, LoraLinear)}


def is_adapter(name: str) -> bool:
    """The parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


@contextmanager
def base_only(model: nn.Module, settings: LoraSettings) -> Generator[None]:
    """Let the base alone count, as the reference policy. Only where nothing trains whole."""
    layers = adapted(model).values()
    for layer in layers:
        layer.lora_scale.zero_()
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_scale.fill_(settings.scale)


def merged(weight_OI: Tensor, layer: LoraLinear, scale: float, dtype: torch.dtype) -> Tensor:
    """The weight with its adapter added, summed in fp32 and then rounded to ``dtype``. Collective.

    Args:
        weight_OI: whole, as the forward pass reads it.
        layer: its adapter, whole or sharded.
        scale: alpha / rank.
        dtype: of the forward pass: adapters count as it reads them.
    """
    up_OR, down_RI = (whole(part.detach()) for part in (layer.lora_B, layer.lora_A))
    return merge(weight_OI, up_OR=up_OR, down_RI=down_RI, scale=scale, dtype=dtype)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_parts(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters' parameters by peft's names, in the model's order; then what trains whole.

    A tied weight comes under each of its names: peft takes each module for one of its own.
    """
    for name, layer in adapted(model).items():
        stem = PREFIX + name.removesuffix(".weight")
        yield stem + DOWN, layer.lora_A
        yield stem + UP, layer.lora_B
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad and not is_adapter(name):
            yield PREFIX + name, param


def write_config(
    folder: Path, settings: LoraSettings, base: str, *, whole_modules: Sequence[str] = ()
) -> None:
    """Write what peft and engines read beside the adapter's weights.

    Args:
        folder: the adapter's.
        settings: of the adapters.
        base: model folder they belong to.
        whole_modules: last names of the modules that are stored whole.
    """
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.targets),
        "modules_to_save": list(whole_modules) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with disk_full_as_error(folder / CONFIG):
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
