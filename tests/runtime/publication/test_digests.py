"""Digests of one export by every hash, and that of a GPU, which must equal its kernel's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.publication.checksum import tensor_checksum
from runtime.publication.digests import Digests
from runtime.publication.mix64 import TILE, Tiles, mix64


# Digests: SGLang 0.5.17's own kernel (`gpu_tensor_hash`), run in Triton's interpreter.
@pytest.mark.parametrize(("make", "digest"), [
    (lambda: torch.arange(100, dtype=torch.float32), "0dbb443ec0651725"),
    (lambda: (torch.arange(35000, dtype=torch.float32) / 7).to(torch.bfloat16).view(5000, 7),
     "71f35911347abbe6"),
    (lambda: torch.tensor([1, 2, 3], dtype=torch.uint8), "78fb8b5ebce4f7df"),
])  # fmt: skip
def test_mix64_is_what_an_engine_says(make, digest):
    assert mix64(make()) == digest


@given(
    st.integers(1, 3 * TILE),
    st.integers(0, 2**31 - 1),
)
def test_mix64_sees_every_word_and_its_place(size, at):
    words = torch.zeros(size, dtype=torch.int32)
    before = mix64(words)
    words[at % size] = 1
    one = mix64(words)
    assert one != before
    if size > 1:
        words[at % size] = 0
        words[(at + 1) % size] = 1
        assert mix64(words) not in (before, one)


def test_empty_tensors_have_a_digest_wherever_they_come() -> None:
    assert mix64(torch.zeros(0)) == "0" * 16
    tiles = Tiles()
    for name, size in (("none", 0), ("some", 5), ("last", 0)):
        tiles.add(name, torch.ones(size))
    assert tiles.result() == {
        "none": "0" * 16, "some": mix64(torch.ones(5)), "last": "0" * 16,
    }  # fmt: skip


def test_one_walk_gives_every_hash_that_is_asked_for():
    weights = {"a": torch.randn(7, 3), "b": torch.randn(5).to(torch.bfloat16)}
    with Digests(["sha256", "mix64"], 10**6, 10**6) as digests:
        for name, tensor in weights.items():
            digests.add(name, tensor)
        found = digests.result()
    assert found["sha256"] == {n: tensor_checksum(t) for n, t in weights.items()}
    assert found["mix64"] == {n: mix64(t) for n, t in weights.items()}
    assert digests.num_bytes == 7 * 3 * 4 + 5 * 2
    with Digests(["mix64"], 10**6, 10**6) as digests:
        digests.add("a", weights["a"])
        assert list(digests.result()) == ["mix64"]
