"""What ``gpu_ranks`` compares: batches that are the same for every side, and two sides of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu_task import SHAPES
from runtime.trainer.protocol import Sequence, TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings

LIMIT = 1e-5
ABSOLUTE = 1e-6
"""Below this a difference counts for nothing: a loss may be close to 0."""
FIGURES = ("loss", "policy_loss", "total_grad_norm", "entropy", "parameter_change_norm")
CASES: dict[str, tuple[str, str, int]] = {
    "tiny float32": ("tiny", "float32", 48),
    "0.6b float32": ("0.6b", "float32", 256),
    "0.6b bfloat16": ("0.6b", "bfloat16", 256),
}
"""By name: shape, dtype, longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    shape: str
    dtype: Any
    longest: int
    model: Path
    is_deterministic: bool = True

    def settings(self) -> TrainerSettings:
        """As a run has them, with every term of the loss."""
        return TrainerSettings(
            loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1, entropy_coef=0.01),
            optimizer=OptimizerSettings(lr=1e-3 if self.shape == "tiny" else 1e-5),
            dtype=self.dtype,
            max_tokens_per_bin=8 * self.longest,
            deterministic=self.is_deterministic,
        )

    def batch(self, update: int) -> TrainBatch:
        """Eight groups of four, of lengths that differ; the same for whoever asks."""
        vocab = SHAPES[self.shape]["vocab_size"]
        rng = np.random.default_rng(update)
        made: list[Sequence] = []
        for group in range(8):
            prompt = rng.integers(4, vocab, int(rng.integers(2, self.longest // 2)))
            for _ in range(4):
                n = int(rng.integers(2, self.longest // 2))
                response = rng.integers(4, vocab, n)
                made.append(
                    Sequence(
                        tokens=np.concatenate([prompt, response]).astype(np.int32),
                        prompt_len=len(prompt),
                        logprobs=rng.normal(-math.log(vocab), 0.3, n).astype(np.float32),
                        mask=np.ones(n, np.float32),
                        advantage=float(rng.normal()),
                        span_ends=np.array([n], np.int32),
                        span_updates=np.array([-1], np.int32),  # of no policy that is current
                        prefill_update=-1,
                        group=group,
                        is_equal=False,
                    )
                )
        return TrainBatch(update=update, sequences=tuple(made), consumed_digest=f"after {update}")


@dataclass(slots=True)
class Side:
    """What one number of ranks made of a case."""

    values: list[dict[str, float]]
    weights: Path
    """Folder of the weights after the last update."""
    state: Path
    took_s: float


def compare(one: Side, other: Side, model: Path) -> dict[str, Any]:
    """Largest differences over the updates both made, and those of the weights."""
    pairs = list(zip(one.values[-len(other.values) :], other.values, strict=True))
    found: dict[str, Any] = {"updates": len(pairs)}
    holds = True
    for name in FIGURES:
        gaps = [(abs(a[name] - b[name]), abs(a[name])) for a, b in pairs if name in a]
        holds &= name == "parameter_change_norm" or all(
            gap <= LIMIT * size + ABSOLUTE for gap, size in gaps
        )
        found[name] = {
            "largest": max(gap for gap, _ in gaps),
            "relative": max(gap / max(size, 1e-12) for gap, size in gaps),
            "last": [pairs[-1][0][name], pairs[-1][1][name]],
        }
    a, b, before = (_weights(folder) for folder in (one.weights, other.weights, model))
    assert a.keys() == b.keys()
    size, change, gap = (_norm(a), _norm(a, before), _norm(a, b))
    found["parameters"] = {"relative": gap / size, "of_their_change": gap / change}
    return {**found, "within": holds and gap / size <= LIMIT, "limit": LIMIT}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        n: t for path in folder.glob("*.safetensors") for n, t in load_file(path, device).items()
    }


def _norm(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor] | None = None) -> float:
    """Of ``a``, or of the way from ``b`` to it, over all tensors both have."""
    total = 0.0
    for name, tensor in a.items():
        if b is None or name in b:
            part = tensor.double() if b is None else tensor.double() - b[name].double()
            total += part.square().sum().item()
    return math.sqrt(total)
