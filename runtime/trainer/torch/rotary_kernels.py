"""The Triton form of ``rotary``; imported only where tensors lie on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(source, target, weight, cos, sin, heads, eps, HEADS: tl.constexpr, SIZE: tl.constexpr,
            HAS_NORM: tl.constexpr):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, SIZE)
    other = (place + SIZE // 2) % SIZE
    inside = head < heads
    x = tl.load(source + head * SIZE + place[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + head * SIZE + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = x * scale * tl.load(weight + place).to(tl.float32)[None, :]
        y = y * scale * tl.load(weight + other).to(tl.float32)[None, :]
    sign = tl.where(place < SIZE // 2, -1.0, 1.0)
    c = tl.load(cos + place).to(tl.float32)[None, :]
    s = (tl.load(sin + place).to(tl.float32) * sign)[None, :]
    tl.store(target + head * SIZE + place[None, :], x * c + y * s, mask=inside)


@triton.jit
def _unrotate(grad, source, target, weight, cos, sin, heads, eps, HEADS: tl.constexpr,
              SIZE: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """Write the gradient by the heads of one token; return its part of the norm's, [SIZE]."""
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, SIZE)
    other = (place + SIZE // 2) % SIZE
    inside = head < heads
    d = tl.load(grad + head * SIZE + place[None, :], mask=inside, other=0.0).to(tl.float32)
    e = tl.load(grad + head * SIZE + other[None, :], mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(place < SIZE // 2, 1.0, -1.0)
    c = tl.load(cos + place).to(tl.float32)[None, :]
    s = (tl.load(sin + other).to(tl.float32) * sign)[None, :]
    d = d * c + e * s
    part = tl.zeros([SIZE], tl.float32)
    if HAS_NORM:
        x = tl.load(source + head * SIZE + place[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = x * scale
        part = tl.sum(d * x, 0)
        d = d * tl.load(weight + place).to(tl.float32)[None, :]
        d = (d - x * (tl.sum(d * x, 1) / SIZE)[:, None]) * scale
    tl.store(target + head * SIZE + place[None, :], d, mask=inside)
    return part


@triton.jit
def _copy(source, target, heads, HEADS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, HEADS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = at < heads * SIZE
    tl.store(target + at, tl.load(source + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def _rotate_forward(joint, query, key, value, query_norm, key_norm, cos, sin, num_queries, num_keys,
                    eps, QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
                    HAS_NORM: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start = joint + token * (num_queries + 2 * num_keys) * SIZE
    cos += token * SIZE
    sin += token * SIZE
    _rotate(start, query + token * num_queries * SIZE, query_norm, cos, sin, num_queries, eps,
            QUERIES, SIZE, HAS_NORM)  # fmt: skip
    start += num_queries * SIZE
    _rotate(start, key + token * num_keys * SIZE, key_norm, cos, sin, num_keys, eps, KEYS, SIZE,
            HAS_NORM)  # fmt: skip
    _copy(start + num_keys * SIZE, value + token * num_keys * SIZE, num_keys, KEYS, SIZE)


@triton.jit
def _rotate_backward(grad_query, grad_key, grad_value, joint, target, partial, query_norm, key_norm,
                     cos, sin, num_queries, num_keys, eps, QUERIES: tl.constexpr,
                     KEYS: tl.constexpr, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start = token * (num_queries + 2 * num_keys) * SIZE
    cos += token * SIZE
    sin += token * SIZE
    query_part = _unrotate(
        grad_query + token * num_queries * SIZE, joint + start, target + start, query_norm, cos,
        sin, num_queries, eps, QUERIES, SIZE, HAS_NORM,
    )  # fmt: skip
    start += num_queries * SIZE
    key_part = _unrotate(
        grad_key + token * num_keys * SIZE, joint + start, target + start, key_norm, cos, sin,
        num_keys, eps, KEYS, SIZE, HAS_NORM,
    )  # fmt: skip
    start += num_keys * SIZE
    _copy(grad_value + token * num_keys * SIZE, target + start, num_keys, KEYS, SIZE)
    if HAS_NORM:
        place = tl.arange(0, SIZE)
        tl.store(partial + token * 2 * SIZE + place, query_part)
        tl.store(partial + (token * 2 + 1) * SIZE + place, key_part)


def rotate_qkv(
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    num_queries: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``rotary.rotate_qkv``; all contiguous, head size a power of two."""
    tokens, size = cos_TE.shape
    num_keys = (joint_TW.shape[1] // size - num_queries) // 2
    query, key, value = (
        joint_TW.new_empty(tokens, n, size) for n in (num_queries, num_keys, num_keys)
    )
    _rotate_forward[(tokens,)](
        joint_TW, query, key, value, query_norm_E, key_norm_E, cos_TE, sin_TE, num_queries,
        num_keys, eps, QUERIES=triton.next_power_of_2(num_queries),
        KEYS=triton.next_power_of_2(num_keys), SIZE=size, HAS_NORM=query_norm_E is not None,
        num_warps=4,
    )  # fmt: skip
    return query, key, value


def rotate_qkv_backward(
    grad_query_THE: Tensor,
    grad_key_TKE: Tensor,
    grad_value_TKE: Tensor,
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``rotary``; all contiguous."""
    tokens, num_queries, size = grad_query_THE.shape
    num_keys = grad_key_TKE.shape[1]
    has_norm = query_norm_E is not None
    target_TW = torch.empty_like(joint_TW)
    # Added up afterwards: programs that add over several tokens themselves wait for memory.
    partial = joint_TW.new_empty(tokens if has_norm else 0, 2, size, dtype=torch.float32)
    _rotate_backward[(tokens,)](
        grad_query_THE, grad_key_TKE, grad_value_TKE, joint_TW, target_TW, partial, query_norm_E,
        key_norm_E, cos_TE, sin_TE, num_queries, num_keys, eps,
        QUERIES=triton.next_power_of_2(num_queries), KEYS=triton.next_power_of_2(num_keys),
        SIZE=size, HAS_NORM=has_norm, num_warps=4,
    )  # fmt: skip
    if query_norm_E is None or key_norm_E is None:
        return target_TW, joint_TW.new_empty(0), joint_TW.new_empty(0)
    whole = partial.sum(0)
    return target_TW, whole[0].to(query_norm_E.dtype), whole[1].to(key_norm_E.dtype)
