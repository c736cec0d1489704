"""Weights in a file in memory that the trainer wrote: opened by name, checked, read where they lie.

The tensors returned are views of the file: they are copied into the model before the call that
named them is answered, and never kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from runtime.engines.embedded.weights import WeightsRefused, dtype_named
from runtime.engines.protocol import TensorSpec
from runtime.engines.shared import SharedBucket, SharedTensor, check_bucket
from runtime.errors import ContractViolation

_PLACE = re.compile(r"milepost-[0-9a-f]{8}")
"""Folder two levels above a bucket: the scratch of a live owner."""
_FIELDS = {"name", "dtype", "shape", "start"}


def read_shared(parts: object) -> dict[str, Tensor]:
    """Tensors of the buckets that a body names.

    Args:
        parts: a list with one object per bucket: ``path``, ``num_bytes``, and ``tensors`` with
            ``name``, ``dtype``, ``shape`` and ``start`` each.

    Raises:
        WeightsRefused: if it is anything else, the file is no bucket of the trainer's, or has
            another size.
    """
    if not isinstance(parts, list) or not parts:
        raise WeightsRefused("serialized_named_tensors: expected a list of shared buckets")
    tensors: dict[str, Tensor] = {}
    for part in cast(list[object], parts):
        try:
            bucket = _bucket(part)
            check_bucket(bucket)
            tensors.update(_open(bucket))
        except (KeyError, TypeError, ValueError, OSError, ContractViolation) as error:
            raise WeightsRefused(f"serialized_named_tensors: no shared bucket: {error}") from error
    return tensors


def _bucket(part: object) -> SharedBucket:
    fields = cast(dict[str, Any], part)
    return SharedBucket(
        path=str(fields["path"]),
        num_bytes=int(fields["num_bytes"]),
        tensors=tuple(map(_tensor, fields["tensors"])),
    )


def _tensor(fields: dict[str, Any]) -> SharedTensor:
    if set(fields) != _FIELDS:
        raise ValueError(f"expected {sorted(_FIELDS)}, got {sorted(fields)}")
    shape = tuple(int(extent) for extent in fields["shape"])
    spec = TensorSpec(name=str(fields["name"]), dtype=str(fields["dtype"]), shape=shape)
    start = int(fields["start"])
    size = dtype_named(spec.dtype).itemsize
    for extent in shape:
        size *= extent
    return SharedTensor(spec=spec, start=start, end=start + size)


def _open(bucket: SharedBucket) -> dict[str, Tensor]:
    path = Path(cast(str, bucket.path))
    if not path.is_absolute() or path.is_symlink() or ".." in path.parts:
        raise ValueError("the path is not that of a bucket")
    if _PLACE.fullmatch(path.parent.parent.name) is None:
        raise ValueError("the path does not lie in the scratch folder of an owner")
    if path.stat().st_size != bucket.num_bytes:
        raise ValueError(f"{path.stat().st_size} bytes there, {bucket.num_bytes} announced")
    # Shared is the only way to map without a copy; nothing here writes to it.
    memory = torch.from_file(str(path), shared=True, size=bucket.num_bytes, dtype=torch.uint8)
    return {
        t.spec.name: memory[t.start : t.end].view(dtype_named(t.spec.dtype)).view(t.spec.shape)
        for t in bucket.tensors
    }
