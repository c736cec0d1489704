"""Where the tests of the real SGLang server run: on a CPU, or on one CUDA GPU.

``MILEPOST_SGLANG_DEVICE=cuda`` says the latter. It is asked for and not looked for: a machine with
a GPU may still run the CPU's environment. A GPU serves in bf16, so its log-probs are held to what
rounding does, and it wants a model of sizes that its kernels have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from runtime.publication.checksum import checksums
from runtime.publication.mix64 import mix64

OLDER = ("0.5.17",)
"""Versions that tell one weight version for a whole response, have no update sessions, and end in
an error of their own at an unknown sampling parameter."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One place, and what is different there."""

    device: str
    dtype: torch.dtype
    atol: float
    """Most that one log-prob may be off (nats)."""
    mean_atol: float
    """Most that the mean over a response may be off (nats)."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Of the models, over ``tiny_models.SHAPE``."""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Of every server."""
    patience: float = 1.0
    """Times what a test may take on a busy CPU."""
    start_s: float = 300.0
    """A start takes 15 s on a quiet core and 22 s on an H200, and 130 s there while kernels are
    compiled; several times that on a busy machine."""

    @property
    def hash(self) -> str:
        """Of its checksums."""
        return "sha256" if self.device == "cpu" else "mix64"

    def timeout(self, seconds: float) -> pytest.MarkDecorator:
        """For a test with a start in it; one of a fixture is not counted."""
        return pytest.mark.timeout(seconds * self.patience, func_only=True)

    def checksums(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """What a server that holds these weights tells."""
        if self.device == "cpu":
            return checksums(named)
        return {name: mix64(tensor) for name, tensor in named}


CPU = Lane(device="cpu", dtype=torch.float32, atol=1e-4, mean_atol=1e-4)

CUDA = Lane(
    device="cuda",
    dtype=torch.bfloat16,
    # A forward in bf16 against float32, this shape, 300 tokens: mean 0.017, largest 0.093 of all
    # tokens. Another model's log-probs are 2.9 off in the mean.
    atol=0.3,
    mean_atol=0.06,
    patience=0.3,
    # Layers of Qwen3 0.6B, two of them: the kernels compiled for that one serve here too.
    shape={
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.05,
    },
    # Of a server without its larger kernel packages. Several of them share the card.
    args={
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 8,
        "mem_fraction_static": 0.3,
    },
)  # fmt: skip

LANE = CUDA if os.environ.get("MILEPOST_SGLANG_DEVICE") == "cuda" else CPU


def assert_logprobs(found: list[float] | torch.Tensor, expected: torch.Tensor) -> None:
    """Log-probs of an engine are those of a float32 forward, as far as the lane's rounding goes."""
    found = torch.as_tensor(found, dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=LANE.atol, rtol=0)
    gap = (found - expected).abs()
    assert not gap.numel() or gap.mean().item() <= LANE.mean_atol


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """``assert_logprobs`` as a question."""
    try:
        assert_logprobs(found, expected)
    except AssertionError:
        return False
    return True
