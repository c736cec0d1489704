"""Weights in memory that an engine of the same machine can open: how they are described.

A bucket is one flat run of bytes that holds several tensors. On a CPU it is a file in memory, on a
GPU a piece of the trainer's device memory. What is described here is checked whole before it leaves
this side: SGLang's server ends on a body that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.engines.protocol import TensorSpec
from runtime.errors import ContractViolation

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIGN = 16
"""Each tensor begins at a multiple of this, which is one of every dtype's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """Where one tensor lies in its bucket."""

    spec: TensorSpec
    start: int
    """First byte."""
    end: int
    """One past the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaHandle:
    """Device memory as CUDA's inter-process calls name it; the fields are torch's."""

    device: str
    """UUID of the GPU: indices differ between processes."""
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    needs_event: bool
    """The reader waits for the writer's work first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBucket:
    """One bucket; exactly one of ``path`` and ``cuda`` is set."""

    num_bytes: int
    tensors: tuple[SharedTensor, ...]
    path: str | None = None
    """File in memory."""
    cuda: CudaHandle | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of its tensors, in order."""
        return tuple(tensor.spec for tensor in self.tensors)


def lay_out(specs: list[TensorSpec]) -> tuple[tuple[SharedTensor, ...], int]:
    """Place tensors one after another; returns them and the bytes of the bucket.

    Raises:
        ContractViolation: for a dtype that cannot be shared.
    """
    placed: list[SharedTensor] = []
    at = 0
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES:
            raise ContractViolation(f"{spec.name}: dtype {spec.dtype} cannot be shared")
        at = -(-at // ALIGN) * ALIGN
        end = at + DTYPE_BYTES[spec.dtype] * math.prod(spec.shape)
        placed.append(SharedTensor(spec=spec, start=at, end=end))
        at = end
    return tuple(placed), at


def check_bucket(bucket: SharedBucket) -> None:
    """Refuse a bucket whose description does not come out.

    Raises:
        ContractViolation: if it is empty, names a tensor twice, or a tensor has another size than
            its place, lies outside the bucket or over another one; or if it lies nowhere.
    """
    problems: list[str] = []
    if not bucket.tensors:
        problems.append("it holds no tensors")
    if (bucket.path is None) == (bucket.cuda is None):
        problems.append("it lies in exactly one of host and device memory, or should")
    names = [tensor.spec.name for tensor in bucket.tensors]
    if len(set(names)) != len(names) or not all(names):
        problems.append("a name is missing or there twice")
    at = 0
    for tensor in bucket.tensors:
        spec = tensor.spec
        size = DTYPE_BYTES.get(spec.dtype, -1) * math.prod(spec.shape)
        if any(extent < 0 for extent in spec.shape) or tensor.end - tensor.start != size:
            problems.append(f"{spec.name}: {tensor.end - tensor.start} bytes for {spec}")
        if tensor.start < at or tensor.start % ALIGN or tensor.end > bucket.num_bytes:
            problems.append(f"{spec.name} lies at [{tensor.start}, {tensor.end}) of the bucket")
        at = max(at, tensor.end)
    if bucket.cuda is not None and (
        bucket.cuda.storage_bytes < bucket.num_bytes
        or not (bucket.cuda.handle and bucket.cuda.event and bucket.cuda.ref_counter)
    ):
        problems.append("its device handle is incomplete or too small")
    if problems:
        raise ContractViolation("a bucket of weights was not sent: " + "; ".join(problems[:5]))
