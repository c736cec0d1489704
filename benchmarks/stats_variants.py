"""The kernel that reads a row of logits once, in several shapes: which one fills the memory's road.

``_row_stats`` of the trainer keeps a running maximum and sum per lane and looks at one element of
each lane at a time. The form here takes several: one exponential per element as well, but the
maximum, and the shrinking that goes with a new one, once per tile. Same results but for rounding.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is not installed everywhere, and its functions are a language of their own.
from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.trainer.torch import kernels

SHAPES: tuple[tuple[int, int, int, int], ...] = (
    (0, 4096, 8, 1),  # the trainer's own
    (0, 2048, 4, 1),
    (0, 2048, 8, 1),
    (0, 8192, 8, 1),
    (0, 8192, 16, 1),
    (4, 1024, 4, 1),
    (4, 2048, 8, 1),
    (8, 1024, 4, 1),
    (8, 2048, 8, 1),
    (16, 1024, 4, 1),
    (4, 2048, 8, 3),
    (8, 1024, 4, 3),
)
"""Tiles at a time (0: the trainer's kernel), lanes, warps, loads begun ahead."""


@triton.jit
def row_stats_tiled(
    logits,
    target,
    logprob,
    normaliser,
    entropy,
    inverse_temperature,
    vocab,
    row_stride,
    WITH_ENTROPY: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As ``_row_stats`` of the trainer, ``TILES`` elements of each lane at a time."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    place = tl.arange(0, TILES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    top = tl.full([BLOCK], -1.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, vocab, TILES * BLOCK, num_stages=STAGES):
        z = tl.load(start + at + place, mask=at + place < vocab, other=float("-inf"))
        z = z.to(tl.float32) * inverse_temperature
        higher = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - higher)
        added = tl.exp(z - higher[None, :])
        total = total * shrink + tl.sum(added, 0)
        if WITH_ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(added > 0, added * z, 0.0), 0)
        top = higher
    highest = tl.max(top, 0)
    scale = tl.exp(top - highest)
    mass = tl.sum(total * scale, 0)
    log_sum = highest + tl.log(mass)
    chosen = tl.load(start + tl.load(target + row)).to(tl.float32) * inverse_temperature
    tl.store(logprob + row, chosen - log_sum)
    tl.store(normaliser + row, log_sum)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_sum - tl.sum(weighted * scale, 0) / mass)


def row_stats(
    logits_CV: Tensor,
    target_C: Tensor,
    shape: tuple[int, int, int, int],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.row_stats``; by a kernel of ``shape``."""
    tiles, block, warps, stages = shape
    rows, vocab = logits_CV.shape
    logprob_C = logits_CV.new_empty(rows, dtype=torch.float32)
    normaliser_C = torch.empty_like(logprob_C)
    entropy_C = torch.zeros_like(logprob_C)
    told: dict[str, Any] = {"WITH_ENTROPY": with_entropy, "BLOCK": block, "num_warps": warps}
    kernel = kernels._row_stats
    if tiles:
        kernel = row_stats_tiled
        told |= {"TILES": tiles, "STAGES": stages}
    kernel[(rows,)](
        logits_CV, target_C, logprob_C, normaliser_C, entropy_C, 1.0 / temperature, vocab,
        logits_CV.stride(0), **told,
    )  # fmt: skip
    return logprob_C, normaliser_C, entropy_C


def rates(rows: int = 4096, vocab: int = 151_936) -> dict[str, dict[str, float | str]]:
    """Microseconds, TB/s read, and the largest difference to the first, by shape."""
    logits_CV = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    target_C = torch.randint(0, vocab, (rows,), device="cuda")
    wanted, _, _ = row_stats(logits_CV, target_C, SHAPES[0])
    found: dict[str, dict[str, float | str]] = {}
    for shape in SHAPES:
        name = "{} x {}, {} warps, {} ahead".format(*shape)
        try:
            got, _, _ = row_stats(logits_CV, target_C, shape)
            taken = _microseconds(lambda shape=shape: row_stats(logits_CV, target_C, shape))
        except Exception as exc:  # an experiment may fail in any way
            found[name] = {"error": f"{type(exc).__name__}: {exc}"[:200]}
            continue
        found[name] = {
            "us": round(taken, 1),
            "tb_per_s": round(logits_CV.nbytes / taken / 1e6, 3),
            "gap": round(float((got - wanted).abs().max()), 7),
        }
    return found


def _microseconds(action: Callable[[], object], times: int = 12) -> float:
    """Median of the later half of calls made one after another."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    each = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    return statistics.median(each[times // 2 :])
