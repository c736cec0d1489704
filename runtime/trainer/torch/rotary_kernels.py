"""The Triton form of ``rotary``; imported only where tensors lie on a GPU."""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is not installed everywhere, and its functions are a language of their own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FORWARD_WARPS = 4
_BACKWARD_WARPS = 4


@triton.jit
def _rotate(source, target, weight, cos, sin, heads, eps, HEADS: tl.constexpr, SIZE: tl.constexpr,
            HAS_NORM: tl.constexpr):  # fmt: skip
    # In halves, each contiguous: loads stay wide, and what is turned need not be read twice.
    half: tl.constexpr = SIZE // 2
    place = tl.arange(0, half)
    head = tl.arange(0, HEADS)[:, None]
    at = head * SIZE + place[None, :]
    inside = head < heads
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE + eps)[:, None]
        low = low * scale * tl.load(weight + place).to(tl.float32)[None, :]
        high = high * scale * tl.load(weight + half + place).to(tl.float32)[None, :]
    cos_low = tl.load(cos + place).to(tl.float32)[None, :]
    cos_high = tl.load(cos + half + place).to(tl.float32)[None, :]
    sin_low = tl.load(sin + place).to(tl.float32)[None, :]
    sin_high = tl.load(sin + half + place).to(tl.float32)[None, :]
    tl.store(target + at, low * cos_low - high * sin_low, mask=inside)
    tl.store(target + half + at, high * cos_high + low * sin_high, mask=inside)


@triton.jit
def _unrotate(grad, source, target, weight, cos, sin, partial, heads, eps, HEADS: tl.constexpr,
              SIZE: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """Write the gradient by the heads of one token, and its part of the norm's."""
    half: tl.constexpr = SIZE // 2
    place = tl.arange(0, half)
    head = tl.arange(0, HEADS)[:, None]
    at = head * SIZE + place[None, :]
    inside = head < heads
    grad_low = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    grad_high = tl.load(grad + half + at, mask=inside, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + place).to(tl.float32)[None, :]
    cos_high = tl.load(cos + half + place).to(tl.float32)[None, :]
    sin_low = tl.load(sin + place).to(tl.float32)[None, :]
    sin_high = tl.load(sin + half + place).to(tl.float32)[None, :]
    by_low = grad_low * cos_low + grad_high * sin_high
    by_high = grad_high * cos_high - grad_low * sin_low
    if HAS_NORM:
        low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE + eps)[:, None]
        low = low * scale
        high = high * scale
        tl.store(partial + place, tl.sum(by_low * low, 0))
        tl.store(partial + half + place, tl.sum(by_high * high, 0))
        by_low = by_low * tl.load(weight + place).to(tl.float32)[None, :]
        by_high = by_high * tl.load(weight + half + place).to(tl.float32)[None, :]
        along = ((tl.sum(by_low * low, 1) + tl.sum(by_high * high, 1)) / SIZE)[:, None]
        by_low = (by_low - low * along) * scale
        by_high = (by_high - high * along) * scale
    tl.store(target + at, by_low, mask=inside)
    tl.store(target + half + at, by_high, mask=inside)


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
    if tl.program_id(1) == 0:  # queries here, keys and values there: more in flight at a time
        _rotate(start, query + token * num_queries * SIZE, query_norm, cos, sin, num_queries, eps,
                QUERIES, SIZE, HAS_NORM)  # fmt: skip
    else:
        start += num_queries * SIZE
        _rotate(start, key + token * num_keys * SIZE, key_norm, cos, sin, num_keys, eps, KEYS,
                SIZE, HAS_NORM)  # fmt: skip
        _copy(start + num_keys * SIZE, value + token * num_keys * SIZE, num_keys, KEYS, SIZE)


@triton.jit
def _rotate_backward(grad_query, grad_key, grad_value, joint, target, partial, query_norm, key_norm,
                     cos, sin, num_queries, num_keys, eps, QUERIES: tl.constexpr,
                     KEYS: tl.constexpr, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start = token * (num_queries + 2 * num_keys) * SIZE
    cos += token * SIZE
    sin += token * SIZE
    partial += token * 2 * SIZE
    if tl.program_id(1) == 0:
        _unrotate(
            grad_query + token * num_queries * SIZE, joint + start, target + start, query_norm,
            cos, sin, partial, num_queries, eps, QUERIES, SIZE, HAS_NORM,
        )  # fmt: skip
    else:
        start += num_queries * SIZE
        _unrotate(
            grad_key + token * num_keys * SIZE, joint + start, target + start, key_norm, cos, sin,
            partial + SIZE, num_keys, eps, KEYS, SIZE, HAS_NORM,
        )  # fmt: skip
        start += num_keys * SIZE
        _copy(grad_value + token * num_keys * SIZE, target + start, num_keys, KEYS, SIZE)


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
    _rotate_forward[(tokens, 2)](
        joint_TW, query, key, value, query_norm_E, key_norm_E, cos_TE, sin_TE, num_queries,
        num_keys, eps, QUERIES=triton.next_power_of_2(num_queries),
        KEYS=triton.next_power_of_2(num_keys), SIZE=size, HAS_NORM=query_norm_E is not None,
        num_warps=_FORWARD_WARPS,
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
    _rotate_backward[(tokens, 2)](
        grad_query_THE, grad_key_TKE, grad_value_TKE, joint_TW, target_TW, partial, query_norm_E,
        key_norm_E, cos_TE, sin_TE, num_queries, num_keys, eps,
        QUERIES=triton.next_power_of_2(num_queries), KEYS=triton.next_power_of_2(num_keys),
        SIZE=size, HAS_NORM=has_norm, num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    if query_norm_E is None or key_norm_E is None:
        return target_TW, joint_TW.new_empty(0), joint_TW.new_empty(0)
    by_query_norm, by_key_norm = partial.sum(0)
    # Copies also in float32: results of an operator may not share memory.
    return (
        target_TW,
        by_query_norm.to(query_norm_E.dtype, copy=True),
        by_key_norm.to(key_norm_E.dtype, copy=True),
    )
