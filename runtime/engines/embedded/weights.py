"""The engine's weights by HF name: check an update whole, then copy it in.

A half-applied update must not exist: names, shapes and dtypes are checked before the first byte of
a parameter changes. Only safetensors is read, from a folder or from a request body; nothing is
unpickled.
"""

# torch and transformers ship partial types; what comes out of them is Unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime.engines.protocol import TensorSpec
from runtime.publication.checksum import checksums


class WeightsRefused(ValueError):
    """An update that does not fit; nothing was changed."""


class Weights:
    """The parameters and persistent buffers of a model, tied ones once."""

    def __init__(self, model: Any) -> None:
        everything: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._by_name = everything
        self._first: dict[int, str] = {}
        for name, tensor in everything.items():
            self._first.setdefault(id(tensor), name)
        self._unique = {name: everything[name] for name in self._first.values()}
        shared = Counter(id(tensor) for tensor in everything.values())
        linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._linear = {n for n in linear & everything.keys() if shared[id(everything[n])] == 1}

    def named(self, name: str) -> Tensor:
        """The weight of this name; KeyError where there is none."""
        return self._by_name[name]

    def first_name(self, name: str) -> str:
        """The name under which a weight, tied or not, is listed; KeyError where there is none."""
        return self._first[id(self._by_name[name])]

    def linear(self, name: str) -> Tensor:
        """The weight of a linear layer.

        Raises:
            WeightsRefused: if it is none, or one that another module uses too.
        """
        if name not in self._linear:
            raise WeightsRefused(f"{name!r} is no weight of a linear layer of its own")
        return self._by_name[name]

    def unique(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by HF name, tied ones under their first name."""
        return iter(self._unique.items())

    def check(self, update: Mapping[str, Tensor], *, whole: bool) -> None:
        """Refuse an update that does not fit.

        Args:
            update: tensors by HF name; tied ones may come under any of their names.
            whole: every weight must be there.

        Raises:
            WeightsRefused: on unknown or missing names, other shapes, or values that are no floats
                where the weight is one.
        """
        self.check_specs(
            [
                TensorSpec(name=n, dtype=_name(t.dtype), shape=tuple(t.shape))
                for n, t in update.items()
            ]
        )
        if whole:
            given = {id(self._by_name[name]) for name in update}
            missing = [name for name, tensor in self._unique.items() if id(tensor) not in given]
            if missing:
                raise WeightsRefused(
                    f"{len(missing)} weights are missing, among them {missing[:3]}"
                )

    def check_specs(self, specs: list[TensorSpec]) -> None:
        """Refuse tensors that fit no weight, before any of them arrives.

        Raises:
            WeightsRefused: on an empty list, unknown names, other shapes, unknown dtypes.
        """
        if not specs:
            raise WeightsRefused("the update holds no tensors")
        for spec in specs:
            tensor = self._by_name.get(spec.name)
            if tensor is None:
                raise WeightsRefused(f"no weight is called {spec.name!r}")
            if tuple(tensor.shape) != spec.shape:
                raise WeightsRefused(
                    f"{spec.name}: shape {list(spec.shape)} does not fit {list(tensor.shape)}"
                )
            if dtype_named(spec.dtype).is_floating_point != tensor.is_floating_point():
                raise WeightsRefused(f"{spec.name}: dtype {spec.dtype} does not fit {tensor.dtype}")

    @torch.no_grad()
    def copy(self, update: Mapping[str, Tensor]) -> None:
        """Copy a checked update in, casting to the engine's dtype."""
        for name, tensor in update.items():
            self._by_name[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """Checksum of every weight by HF name, tied ones under their first name."""
        return checksums(self.unique())


def dtype_named(name: str) -> torch.dtype:
    """The dtype called ``float32`` or ``torch.float32``.

    Raises:
        WeightsRefused: if there is none.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsRefused(f"unknown dtype {name!r}")
    return dtype


def read_folder(path: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files.

    Raises:
        WeightsRefused: if there are none, one is unreadable, or the index names files that are not
            there.
    """
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            files = [folder / Path(name).name for name in names]
        else:
            files = sorted(folder.glob("*.safetensors"))
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors.update(load_file(file))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise WeightsRefused(f"cannot read safetensors in {path!r}: {error}") from error
    if not tensors:
        raise WeightsRefused(f"no safetensors files in {path!r}")
    return tensors


def read_body(parts: object) -> dict[str, Tensor]:
    """Tensors of a request body: a list with one base64 text of safetensors bytes.

    Raises:
        WeightsRefused: if it is anything else, SGLang's pickled form among them.
    """
    expected = "expected a list of base64 texts, each a safetensors file"
    if not isinstance(parts, list) or not parts:
        raise WeightsRefused(f"serialized_named_tensors: {expected}")
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if not isinstance(part, str):
            raise WeightsRefused(f"serialized_named_tensors: {expected}")
        try:
            tensors.update(load_bytes(base64.b64decode(part, validate=True)))
        except (binascii.Error, ValueError, KeyError, SafetensorError) as error:
            raise WeightsRefused(f"serialized_named_tensors: {expected}: {error}") from error
    return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
