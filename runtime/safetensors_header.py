"""What a safetensors file says it holds, checked against its size without reading any data.

A server may end on a file that its library refuses (docs/engine-contract.md). So what passes here
the library reads; where the two could differ, this side is the stricter. Format: 8 bytes
little-endian header length, that many bytes of JSON, then the tensors' data without gaps.

Standard library only: it is also read inside a server, under the server's own interpreter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Dtypes by the format's name."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_COUNT = 2**63


class HeaderRefused(ValueError):
    """These are no safetensors, or not all of them."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's name, a key of ``ITEM_BYTES``."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int
    """One past the last."""


def tensors_of_file(path: Path) -> list[PlacedTensor]:
    """Tensors of a file by place; reads the header alone.

    Raises:
        HeaderRefused: if it is damaged, or the file is shorter or longer than it says.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        return _tensors(file.read, os.fstat(file.fileno()).st_size)


def tensors_of_bytes(data: bytes) -> list[PlacedTensor]:
    """Tensors of a file that is in memory, by place.

    Raises:
        HeaderRefused: as ``tensors_of_file``.
    """
    at = 0

    def read(count: int) -> bytes:
        nonlocal at
        at += count
        return data[at - count : at]

    return _tensors(read, len(data))


def _tensors(read: Callable[[int], bytes], size: int) -> list[PlacedTensor]:
    length = int.from_bytes(read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise HeaderRefused(f"{size} bytes hold no header of {length} bytes")
    base = 8 + length
    entries = _parsed(read(length))
    found = [_tensor(name, entry, base) for name, entry in entries.items() if name != _METADATA]
    found.sort(key=lambda tensor: (tensor.start, tensor.end))
    at = base
    for tensor in found:
        if tensor.start != at:
            raise HeaderRefused(f"{tensor.name} begins at {tensor.start}, {at} was its place")
        at = tensor.end
    if at != size:
        raise HeaderRefused(f"its tensors end at {at}, the file at {size} bytes")
    return found


def _parsed(text: bytes) -> dict[str, object]:
    """The header's JSON object; a name that is there twice means two readers may differ."""
    try:
        if not text.startswith(b"{"):
            raise HeaderRefused("its header is no JSON object")
        header = cast(
            object,
            json.loads(text.decode(), object_pairs_hook=_once_each, parse_int=_natural),
        )
    except (ValueError, RecursionError) as error:
        raise HeaderRefused(f"its header cannot be read: {error}") from error
    assert isinstance(header, dict), "what begins with a brace and parses is an object"
    entries = cast(dict[str, object], header)
    metadata = entries.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in cast(dict[str, object], metadata).values()
    ):
        raise HeaderRefused("its metadata are no texts")
    return entries


_METADATA = "__metadata__"


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HeaderRefused("a name is there twice")
    for name, value in pairs:
        # Half of a surrogate pair can be written in JSON, and is no text.
        name.encode()
        if isinstance(value, str):
            value.encode()
    return found


def _natural(digits: str) -> int:
    if digits.startswith("-"):
        raise HeaderRefused(f"{digits} is no extent")
    return int(digits)


def _tensor(name: str, entry: object, base: int) -> PlacedTensor:
    if not isinstance(entry, dict) or (fields := cast(dict[str, object], entry)).keys() != _FIELDS:
        raise HeaderRefused(f"{name} is not described by {sorted(_FIELDS)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderRefused(f"{name} has the unknown dtype {dtype!r:.40}")
    extents, (start, end) = _counts(name, shape), _counts(name, offsets, 2)
    count = ITEM_BYTES[dtype]
    for extent in extents:
        count *= extent
        if count >= _MAX_COUNT:
            raise HeaderRefused(f"{name} is larger than any file")
    if end - start != count:
        raise HeaderRefused(f"{name}: {end - start} bytes for {dtype} {list(extents)}")
    return PlacedTensor(name, dtype, extents, base + start, base + end)


def _counts(name: str, value: object, length: int | None = None) -> tuple[int, ...]:
    if isinstance(value, list) and length in (None, len(cast(list[object], value))):
        counts = cast(list[object], value)
        if all(type(count) is int and count < _MAX_COUNT for count in counts):
            return tuple(cast(list[int], counts))
    raise HeaderRefused(f"{name}: {value!r:.80} are no counts")
