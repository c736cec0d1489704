"""The tiles of ``mix64`` as one kernel, for weights in device memory."""

# Triton's language has no types that a checker could follow.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _mixed(x):
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x = x ^ (x >> 13)
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["count", "seed_a", "seed_b"])
def _tiles(words, out, count, seed_a, seed_b, TILE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    a = tl.zeros((), dtype=tl.uint32)
    b = tl.zeros((), dtype=tl.uint32)
    start_a = tl.full((), seed_a, tl.uint32)
    start_b = tl.full((), seed_b, tl.uint32)
    for at in tl.static_range(0, TILE, BLOCK):
        index = first + at + tl.arange(0, BLOCK)
        is_there = index < count
        value = tl.load(words + index, mask=is_there, other=0).to(tl.uint32, bitcast=True)
        place = index.to(tl.uint32)
        from_a = place * tl.full((), 0x27D4EB2D, tl.uint32) + start_a
        from_b = place * tl.full((), 0x165667B1, tl.uint32) + start_b
        mixed_a = _mixed(value ^ (from_a ^ ((place << 15) | (place >> 17))))
        mixed_b = _mixed(value ^ (from_b ^ ((place << 13) | (place >> 19))))
        a += tl.sum(tl.where(is_there, mixed_a, 0), axis=0).to(tl.uint32)
        b += tl.sum(tl.where(is_there, mixed_b, 0), axis=0).to(tl.uint32)
    size = (tl.full((), count, tl.int64) * 4).to(tl.uint32)
    high = _mixed(a ^ size).to(tl.uint64)
    low = _mixed(b ^ size).to(tl.uint64)
    tl.store(out + tl.program_id(0), ((high << 32) | low).to(tl.int64, bitcast=True))


def tiles_on_gpu(words: torch.Tensor, *, seeds: tuple[int, int]) -> torch.Tensor:
    """Tiles of int32 words; int64 on the same device."""
    from runtime.publication.mix64 import TILE

    out = torch.empty(triton.cdiv(words.numel(), TILE), dtype=torch.int64, device=words.device)
    if words.numel():
        kernel: Any = _tiles
        kernel[(out.numel(),)](words, out, words.numel(), *seeds, TILE=TILE, BLOCK=_BLOCK)
    return out
