"""Headers of safetensors files, held against the library that servers read them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from runtime.safetensors_header import (
    ITEM_BYTES,
    HeaderRefused,
    PlacedTensor,
    tensors_of_bytes,
    tensors_of_file,
)

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Plan = dict[str, tuple[str, tuple[int, ...]]]
extents = st.integers(min_value=0, max_value=3)
shapes = st.lists(extents, max_size=3).map(tuple)
plans = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes),
    max_size=5,
)


def made(plan: Plan) -> bytes:
    """A file of the library's with zeros."""
    return save({n: torch.zeros(shape).to(TORCH[code]) for n, (code, shape) in plan.items()})


def library_reads(data: bytes) -> set[str] | None:
    """Names that the library finds; None where it refuses."""
    try:
        return set(load(data))
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        return None


def file_of(header: object, num_bytes: int, *, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


@given(plans)
def test_what_the_library_writes_is_read_as_it_was_meant(plan: Plan):
    found = tensors_of_bytes(made(plan))
    assert {t.name: (t.dtype, t.shape) for t in found} == plan
    for tensor in found:
        code, shape = plan[tensor.name]
        assert tensor.end - tensor.start == torch.zeros(shape, dtype=TORCH[code]).nbytes


def test_a_tensors_place_holds_its_bytes(tmp_path: Path):
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7, 8], dtype=torch.int16)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(weights))
    data = path.read_bytes()
    for tensor in tensors_of_file(path):
        expected = weights[tensor.name].numpy().tobytes()
        assert data[tensor.start : tensor.end] == expected


def test_a_file_is_refused_wherever_it_is_cut_and_with_anything_after_it(tmp_path: Path):
    whole = save({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.uint8)})
    path = tmp_path / "x.safetensors"
    for data in (*(whole[:cut] for cut in range(len(whole))), whole + b"\0"):
        path.write_bytes(data)
        with pytest.raises(HeaderRefused):
            tensors_of_file(path)
        assert library_reads(data) is None
    path.write_bytes(whole)
    assert len(tensors_of_file(path)) == 2


@given(plans, st.data())
def test_any_file_is_refused_wherever_it_is_cut(plan: Plan, data: st.DataObject):
    whole = made(plan)
    cut = data.draw(st.integers(min_value=0, max_value=len(whole) - 1))
    with pytest.raises(HeaderRefused):
        tensors_of_bytes(whole[:cut])


@given(plans.filter(bool), st.data())
def test_what_passes_after_any_damage_to_the_header_the_library_reads_too(
    plan: Plan, data: st.DataObject
):
    """A bit flipped, bytes gone, put in or said twice: whatever a torn write leaves."""
    whole = made(plan)
    end = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(min_value=0, max_value=end - 1))
    till = data.draw(st.integers(min_value=at, max_value=end))
    put = data.draw(st.binary(max_size=3) | st.just(whole[at:till]) | st.just(whole[at:till] * 2))
    damaged = bytearray(whole[:at] + put + whole[till:])
    if data.draw(st.booleans()):  # the length fits again, so that the text itself is looked at
        length = max(0, len(damaged) - 8 - (len(whole) - end))
        damaged[:8] = length.to_bytes(8, "little")
    try:
        found = tensors_of_bytes(bytes(damaged))
    except HeaderRefused:
        return
    assert {tensor.name for tensor in found} == library_reads(bytes(damaged))


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"a": {**ONE, "dtype": "F31"}}, 8),
        ({"a": {**ONE, "dtype": 4}}, 8),
        ({"a": {**ONE, "shape": [3]}}, 8),
        ({"a": {**ONE, "shape": [-2]}}, 8),
        ({"a": {**ONE, "shape": [2.0]}}, 8),
        ({"a": {**ONE, "shape": [True, 2]}}, 8),
        ({"a": {**ONE, "shape": 2}}, 8),
        ({"a": {**ONE, "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}, 0),
        ({"a": {**ONE, "data_offsets": [0, 8, 8]}}, 8),
        ({"a": {**ONE, "data_offsets": [8, 0]}}, 8),
        ({"a": {**ONE, "data_offsets": [2**70, 2**70 + 8]}}, 8),
        ({"a": {**ONE, "data_offsets": [4, 12]}}, 12),  # a gap in front
        ({"a": ONE, "b": ONE}, 8),  # one over the other
        ({"a": ONE, "b": {**ONE, "data_offsets": [9, 17]}}, 17),  # a gap between
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": {**ONE, "more": 1}}, 8),
        ({"a": [ONE]}, 8),
        ({"a": ONE, "__metadata__": {"n": 1}}, 8),
        ({"a": ONE, "__metadata__": "x"}, 8),
        ([ONE], 8),
        ("a", 0),
        (None, 0),
    ],
)
def test_a_description_that_does_not_come_out_is_refused(header: Any, num_bytes: int):
    with pytest.raises(HeaderRefused):
        tensors_of_bytes(file_of(header, num_bytes))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b" {}",
        b"{}x",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"a":NaN}',
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"a":"x","a":"y"}}',
        b'{"a":' + b"[" * 200_000,
    ],
)
def test_a_text_that_readers_may_take_otherwise_is_refused(text: bytes):
    with pytest.raises(HeaderRefused):
        tensors_of_bytes(file_of(None, 0, text=text))


def test_a_length_beyond_the_file_allocates_nothing():
    for length in (2**63, 2**40, 100_000_001):
        with pytest.raises(HeaderRefused, match="hold no header"):
            tensors_of_bytes(length.to_bytes(8, "little") + b"{}")


def test_nothing_is_something():
    assert tensors_of_bytes(file_of({}, 0)) == []
    empty = {"dtype": "F32", "shape": [0, 5], "data_offsets": [0, 0]}
    (found,) = tensors_of_bytes(file_of({"a": empty, "__metadata__": {"format": "pt"}}, 0))
    assert (found.name, found.shape, found.end - found.start) == ("a", (0, 5), 0)
    assert isinstance(found, PlacedTensor)
