"""A bucket of weights as the body of ``/update_weights_from_tensor``, for each kind of engine.

SGLang takes a pickle there, and its whole server ends on one that it cannot read. So this side
writes the few instructions itself, from a checked description and nothing else: no object of ours
is pickled, no module of SGLang is needed, and what cannot be described cannot be sent. Nothing is
ever read back from a pickle.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from runtime.engines.own_format import NAME
from runtime.engines.shared import CudaHandle, SharedBucket, check_bucket
from runtime.errors import ContractViolation

_TENSOR_BUCKET = "sglang.srt.weight_sync.tensor_bucket"
_PATCH_TORCH = "sglang.srt.utils.patch_torch"
_MAX_TEXT = 2**16


@dataclass(frozen=True, slots=True)
class _Name:
    """A global of the reader's."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Call:
    """A global of the reader's, called with arguments."""

    function: _Name
    arguments: tuple[object, ...]


def memory_body(bucket: SharedBucket) -> dict[str, object]:
    """For the embedded engine: where the bucket lies, as plain JSON.

    Raises:
        ContractViolation: if the description does not come out, or it lies on a GPU.
    """
    check_bucket(bucket)
    assert bucket.path is not None, "the transport chose the wrong form"
    return {
        "load_format": "shared_memory",
        "serialized_named_tensors": [
            {
                "path": bucket.path,
                "num_bytes": bucket.num_bytes,
                "tensors": [
                    {
                        "name": tensor.spec.name,
                        "dtype": tensor.spec.dtype,
                        "shape": tensor.spec.shape,
                        "start": tensor.start,
                    }
                    for tensor in bucket.tensors
                ],
            }
        ],
    }


def cuda_body(bucket: SharedBucket, *, num_ranks: int) -> dict[str, object]:
    """For SGLang: one text per tensor-parallel rank, ``flattened_bucket``.

    Raises:
        ContractViolation: if the description does not come out.
    """
    check_bucket(bucket)
    assert bucket.cuda is not None, "the transport chose the wrong form"
    text = base64.b64encode(_pickle(_bucket_value(bucket, bucket.cuda))).decode()
    return {"load_format": "flattened_bucket", "serialized_named_tensors": [text] * num_ranks}


def own_body(buckets: Sequence[SharedBucket], *, num_ranks: int) -> dict[str, object]:
    """For our plugin in SGLang: all buckets as plain values, one text per tensor-parallel rank.

    Raises:
        ContractViolation: if there are none, or a description does not come out.
    """
    if not buckets:
        raise ContractViolation("no buckets of weights were given")
    for bucket in buckets:
        check_bucket(bucket)
    text = base64.b64encode(_pickle({"buckets": [_plain_value(b) for b in buckets]})).decode()
    return {"load_format": NAME, "serialized_named_tensors": [text] * num_ranks}


def _plain_value(bucket: SharedBucket) -> dict[str, object]:
    cuda = bucket.cuda
    assert cuda is not None, "the transport chose the wrong form"
    return {
        "num_bytes": bucket.num_bytes,
        "cuda": (
            cuda.device,
            cuda.handle,
            cuda.storage_bytes,
            cuda.storage_offset,
            cuda.ref_counter,
            cuda.ref_counter_offset,
            cuda.event,
            cuda.needs_event,
        ),
        "tensors": [
            (t.spec.name, t.spec.dtype, t.spec.shape, t.start, t.end) for t in bucket.tensors
        ],
    }


def _bucket_value(bucket: SharedBucket, cuda: CudaHandle) -> dict[str, object]:
    uint8 = _Name("torch", "uint8")
    tensor = _Call(
        _Name(_PATCH_TORCH, "_rebuild_cuda_tensor_modified"),
        (
            _Name("torch", "Tensor"),
            (bucket.num_bytes,),
            (1,),
            0,
            _Name("torch.storage", "TypedStorage"),
            uint8,
            cuda.device,
            cuda.handle,
            cuda.storage_bytes,
            cuda.storage_offset,
            False,
            cuda.ref_counter,
            cuda.ref_counter_offset,
            cuda.event,
            cuda.needs_event,
        ),
    )
    metadata = [
        _Call(
            _Name(_TENSOR_BUCKET, "FlattenedTensorMetadata"),
            (
                t.spec.name,
                t.spec.shape,
                _Name("torch", t.spec.dtype),
                t.start,
                t.end,
                t.end - t.start,
            ),
        )
        for t in bucket.tensors
    ]
    return {"flattened_tensor": tensor, "metadata": metadata}


def _pickle(value: object) -> bytes:
    """Write one value in pickle's protocol 4, without memory of what was written before."""
    return b"\x80\x04" + _write(value) + b"."


def _write(value: object) -> bytes:
    match value:
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            if 0 <= value < 2**31:
                return b"J" + struct.pack("<i", value)
            size = (value.bit_length() + 8) // 8
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case str():
            text = value.encode()
            assert len(text) < _MAX_TEXT, "names and UUIDs are short"
            return b"X" + struct.pack("<I", len(text)) + text
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case _Name(module=module, name=name):
            return _write(module) + _write(name) + b"\x93"
        case _Call(function=function, arguments=arguments):
            return _write(function) + _write(arguments) + b"R"
        case tuple():
            return b"(" + _all(cast(tuple[object, ...], value)) + b"t"
        case list():
            return b"](" + _all(cast(list[object], value)) + b"e"
        case dict():
            items = cast(dict[str, object], value).items()
            return b"}(" + b"".join(_write(k) + _write(v) for k, v in items) + b"u"
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a bucket's body")


def _all(values: Sequence[object]) -> bytes:
    return b"".join(map(_write, values))
