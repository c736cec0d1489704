"""The bodies that carry weights: what leaves is right, and what is not right never leaves."""

from __future__ import annotations

import base64
import io
import pickle
import pickletools
import sys
import types
from dataclasses import dataclass, replace

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.engines.bucket_body import cuda_body, memory_body, own_body
from runtime.engines.client import HttpEngineClient
from runtime.engines.protocol import EngineInfo, TensorSpec
from runtime.engines.shared import CudaHandle, SharedBucket, check_bucket, lay_out
from runtime.errors import ContractViolation, EngineRefused

HANDLE = CudaHandle(
    device="GPU-12ab", handle=b"\x00h" * 33, storage_bytes=2**33, storage_offset=2**32 + 1,
    ref_counter=b"/torch_1_2", ref_counter_offset=3, event=b"e" * 64, needs_event=True,
)  # fmt: skip
specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=20),
        dtype=st.sampled_from(["bfloat16", "float32", "uint8"]),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda spec: spec.name,
)


def bucket_of(made: list[TensorSpec], **where) -> SharedBucket:
    tensors, num_bytes = lay_out(made)
    return SharedBucket(num_bytes=num_bytes, tensors=tensors, **(where or {"cuda": HANDLE}))


@dataclass
class Metadata:
    """Fields of the reader's class, by their positions."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def read(text: str):
    """Read a body as its receiver does, with stand-ins for the receiver's own names."""
    allowed = {
        ("torch", "Tensor"): torch.Tensor,
        ("torch.storage", "TypedStorage"): torch.TypedStorage,
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): lambda *fields: fields,
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
    }

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) in allowed:
                return allowed[module, name]
            assert module == "torch", (module, name)
            return getattr(torch, name)

    return Reader(io.BytesIO(base64.b64decode(text, validate=True))).load()


@given(made=specs)
def test_a_reader_finds_every_tensor_where_it_lies(made):
    bucket = bucket_of(made)
    (text,) = cuda_body(bucket, num_ranks=1)["serialized_named_tensors"]
    pickletools.dis(base64.b64decode(text), out=io.StringIO())  # no opcode is out of place
    found = read(text)
    fields = found["flattened_tensor"]
    assert fields == (
        torch.Tensor, (bucket.num_bytes,), (1,), 0, torch.TypedStorage, torch.uint8,
        HANDLE.device, HANDLE.handle, HANDLE.storage_bytes, HANDLE.storage_offset, False,
        HANDLE.ref_counter, HANDLE.ref_counter_offset, HANDLE.event, True,
    )  # fmt: skip
    flat = torch.arange(bucket.num_bytes).to(torch.uint8)
    for tensor, meta in zip(bucket.tensors, found["metadata"], strict=True):
        assert (meta.name, meta.shape) == (tensor.spec.name, tensor.spec.shape)
        there = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        assert str(there.dtype) == f"torch.{tensor.spec.dtype}"
        assert meta.numel == meta.end_idx - meta.start_idx


def test_every_rank_of_an_engine_gets_a_text():
    bucket = bucket_of([TensorSpec(name="w", dtype="bfloat16", shape=(4,))])
    assert len(cuda_body(bucket, num_ranks=2)["serialized_named_tensors"]) == 2


@given(made=st.lists(specs, min_size=1, max_size=3))
def test_our_plugin_gets_plain_values_and_no_name_to_look_up(made):
    buckets = [bucket_of(each) for each in made]
    body = own_body(buckets, num_ranks=2)
    first, second = body["serialized_named_tensors"]
    assert first == second
    data = base64.b64decode(first, validate=True)
    assert not any(op.name in ("GLOBAL", "STACK_GLOBAL", "REDUCE") for op, _, _ in
                   pickletools.genops(data))  # fmt: skip
    for bucket, found in zip(buckets, pickle.loads(data)["buckets"], strict=True):
        flat = torch.arange(bucket.num_bytes).to(torch.uint8)
        assert found["num_bytes"] == bucket.num_bytes
        assert found["cuda"] == (
            HANDLE.device, HANDLE.handle, HANDLE.storage_bytes, HANDLE.storage_offset,
            HANDLE.ref_counter, HANDLE.ref_counter_offset, HANDLE.event, True,
        )  # fmt: skip
        for spec, (name, dtype, shape, start, end) in zip(bucket.specs, found["tensors"],
                                                          strict=True):  # fmt: skip
            assert (name, dtype, shape) == (spec.name, spec.dtype, spec.shape)
            assert flat[start:end].view(getattr(torch, dtype)).reshape(shape).shape == shape


ONE = bucket_of([
    TensorSpec(name="a", dtype="float32", shape=(2, 2)),
    TensorSpec(name="b", dtype="float32", shape=(3,)),
])  # fmt: skip
FIRST, SECOND = ONE.tensors
WRONG = {
    "nothing in it": replace(ONE, tensors=()),
    "nowhere": replace(ONE, cuda=None),
    "in two places": replace(ONE, path="/dev/shm/x"),
    "a name twice": replace(ONE, tensors=(FIRST, replace(SECOND, spec=replace(
        SECOND.spec, name="a")))),
    "another size": replace(ONE, tensors=(replace(FIRST, spec=replace(
        FIRST.spec, shape=(7,))), SECOND)),
    "another dtype": replace(ONE, tensors=(replace(FIRST, spec=replace(
        FIRST.spec, dtype="object")), SECOND)),
    "a negative extent": replace(ONE, tensors=(replace(FIRST, spec=replace(
        FIRST.spec, shape=(-2, -2))), SECOND)),
    "over one another": replace(ONE, tensors=(FIRST, replace(SECOND, start=0, end=12))),
    "outside": replace(ONE, num_bytes=20),
    "a handle too small": replace(ONE, cuda=replace(HANDLE, storage_bytes=8)),
    "no handle": replace(ONE, cuda=replace(HANDLE, handle=b"")),
}  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_come_out_is_never_sent(what, own):
    """SGLang's whole server ends on a malformed body."""

    async def main():
        sent = []

        class Silent(HttpEngineClient):
            async def info(self):
                return EngineInfo(
                    version="0.5.17", vocab_size=8, context_length=8, max_running_requests=1,
                    native_spans=False, takes_salt=True, update_bracket=False,
                    shares="cuda" if WRONG[what].cuda else "memory", own_buckets=own,
                )  # fmt: skip

            async def _update(self, path, body):
                sent.append(path)

        async with Silent("http://127.0.0.1:1") as client:
            with pytest.raises(ContractViolation, match="was not sent"):
                await client.update_from_shared(WRONG[what], flush=False)
        assert sent == []

    anyio.run(main)


def test_memory_that_an_engine_cannot_open_is_not_offered():
    async def main():
        class Host(HttpEngineClient):
            async def info(self):
                return EngineInfo(
                    version="x", vocab_size=8, context_length=8, max_running_requests=1,
                    native_spans=True, takes_salt=True, update_bracket=False, shares="memory",
                )  # fmt: skip

        async with Host("http://127.0.0.1:1") as client:
            with pytest.raises(EngineRefused, match="device memory"):
                await client.update_from_shared(ONE, flush=False)

    anyio.run(main)


@given(made=specs)
def test_a_bucket_that_was_laid_out_is_accepted(made):
    check_bucket(bucket_of(made, path="/dev/shm/milepost-00000000/0/bucket-0"))
    body = memory_body(bucket_of(made, path="/x"))
    assert [t["name"] for t in body["serialized_named_tensors"][0]["tensors"]] == [
        spec.name for spec in made
    ]


def test_the_writer_needs_no_module_of_the_readers():
    before = set(sys.modules)
    cuda_body(ONE, num_ranks=1)
    assert not any(name.startswith("sglang") for name in set(sys.modules) - before)
    assert isinstance(sys.modules["pickle"], types.ModuleType)
