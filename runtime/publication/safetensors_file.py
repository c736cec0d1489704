"""Safetensors files written as a stream: the header from specs, then each tensor as it comes.

The library's own writer wants all tensors of a file at once, which is a second copy of the weights.
Format: 8 bytes little-endian header length, JSON header padded with spaces to 8 bytes, data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from runtime.engines.protocol import TensorSpec
from runtime.errors import ContractViolation
from runtime.publication.checksum import tensor_bytes
from runtime.rundir.atomic import disk_full_as_error

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape))


def spec_bytes(spec: TensorSpec) -> int:
    """Size of a tensor's data in bytes.

    Raises:
        ContractViolation: if the dtype has no place in a safetensors file.
    """
    if spec.dtype not in _DTYPES:
        raise ContractViolation(f"{spec.name}: dtype {spec.dtype} cannot be stored as safetensors")
    return getattr(torch, spec.dtype).itemsize * prod(spec.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a snapshot, and what goes into it, in order."""

    file: str
    specs: tuple[TensorSpec, ...]


def plan_shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[Shard]:
    """Cut specs, in their order, into files of at most ``max_bytes`` (a larger tensor alone)."""
    runs: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not runs or size + spec_bytes(spec) > max_bytes:
            runs.append([])
            size = 0
        runs[-1].append(spec)
        size += spec_bytes(spec)
    if len(runs) == 1:
        return [Shard("model.safetensors", tuple(runs[0]))]
    return [
        Shard(f"model-{i:05d}-of-{len(runs):05d}.safetensors", tuple(run))
        for i, run in enumerate(runs, start=1)
    ]


def index_json(shards: Sequence[Shard]) -> bytes | None:
    """The HF index of several shards; None for a single file, which needs none."""
    if len(shards) == 1:
        return None
    names = {spec.name: shard.file for shard in shards for spec in shard.specs}
    size = sum(spec_bytes(spec) for shard in shards for spec in shard.specs)
    payload = {"metadata": {"total_size": size}, "weight_map": names}
    return json.dumps(payload, indent=1, sort_keys=True).encode() + b"\n"


class SafetensorsFile:
    """One file being written: each tensor of its specs once, in any order.

    An existing file of the same name is written over in place: on tmpfs its pages are then reused,
    which is several times faster than new ones. It must have no reader left.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._path = path
        self._header, self._offsets, self._size = _layout(specs)
        self._waiting = {spec.name: spec for spec in specs}
        self._fd = -1

    def __enter__(self) -> Self:
        with disk_full_as_error(self._path):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._write(self._header, 0)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place.

        Raises:
            ContractViolation: if the specs announce no such tensor, or it came before.
            DiskFull: if there is no room.
        """
        found = spec_of(name, tensor)
        expected = self._waiting.pop(name, None)
        if expected != found:
            raise ContractViolation(f"the export gave {found} where its specs say {expected}")
        self._write(tensor_bytes(tensor), self._offsets[name])

    def finish(self, *, durable: bool) -> int:
        """Cut off what an older, longer file left; fsync when ``durable``. Returns the size.

        Raises:
            ContractViolation: if a tensor is missing.
        """
        if self._waiting:
            raise ContractViolation(
                f"{self._path.name} lacks {len(self._waiting)} tensors: {sorted(self._waiting)[:3]}"
            )
        os.ftruncate(self._fd, self._size)
        if durable:
            with disk_full_as_error(self._path):
                os.fsync(self._fd)
        return self._size

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        with disk_full_as_error(self._path):
            while view:
                written = os.pwrite(self._fd, view[: 64 << 20], at)
                at += written
                view = view[written:]


def _layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Header, place of each tensor in the file, and the file's size.

    Wide dtypes lie first, so that every tensor is aligned and can be mapped.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    at = 0
    for spec in sorted(specs, key=lambda s: -getattr(torch, s.dtype).itemsize):
        end = at + spec_bytes(spec)
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        offsets[spec.name] = at
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + o for name, o in offsets.items()}, len(header) + at
