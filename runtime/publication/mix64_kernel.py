"""The tiles of ``mix64`` as one kernel over many tensors, for weights in device memory."""

# Triton's language has no types that a checker could follow.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_FIELDS = 4
"""Of one tensor in the table: address, words, first tile, and nothing, so that what follows the
table is always aligned alike and the kernel compiled once."""


@triton.jit
def _mixed(x):
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x85EBCA6B, tl.uint32)
    x = x ^ (x >> 13)
    x = x * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["seed_a", "seed_b"])
def _tiles(
    table, owners, out, seed_a, seed_b, TILE: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    owner = table + tl.load(owners + tile) * FIELDS
    words = tl.load(owner).to(tl.pointer_type(tl.int32))
    count = tl.load(owner + 1)
    first = (tile - tl.load(owner + 2)) * TILE
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
    size = (count * 4).to(tl.uint32)
    high = _mixed(a ^ size).to(tl.uint64)
    low = _mixed(b ^ size).to(tl.uint64)
    tl.store(out + tile, ((high << 32) | low).to(tl.int64, bitcast=True))


def tiles_on_gpu(
    tensors: Sequence[torch.Tensor], *, tile: int, seeds: tuple[int, int]
) -> torch.Tensor:
    """Tiles of int32 words, tensor after tensor; int64 on the same device.

    The tensors must live until the device has got there: the kernel knows their addresses only.
    """
    device = tensors[0].device
    counts = torch.tensor([words.numel() for words in tensors])
    each = (counts + tile - 1) // tile
    ends = each.cumsum(0)
    total = int(ends[-1])
    addresses = torch.tensor([words.data_ptr() for words in tensors])
    rows = [addresses, counts, ends - each, torch.zeros_like(counts)]
    table = torch.stack(rows, dim=1).reshape(-1)
    owners = torch.repeat_interleave(torch.arange(len(tensors)), each)
    told = torch.cat([table, owners]).to(device)
    out = torch.empty(total, dtype=torch.int64, device=device)
    if total:
        kernel: Any = _tiles
        kernel[(total,)](
            told, told[table.numel() :], out, *seeds, TILE=tile, BLOCK=_BLOCK, FIELDS=_FIELDS
        )
    return out
