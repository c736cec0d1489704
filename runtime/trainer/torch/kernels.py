"""Triton kernels of the trainer. Imported only where tensors lie on a GPU: Triton is not elsewhere.

Each has a plain torch form beside its caller, which the CPU runs and which says what it computes.
Every kernel reads and writes each element once; what is slow about the plain forms on a GPU is that
they do it five to ten times.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton is not installed everywhere, and its functions are a language of their own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Legend: C rows of logits, V vocabulary, N elements.

_BLOCK_V = 4096
_STATS_TILES = 8
_STATS_LANES = 1024
_STATS_WARPS = 4
_BLOCK_N = 2048
_BLOCK_I = 1024


@triton.jit
def _row_stats(
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
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    place = tl.arange(0, TILES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # One running maximum and sum per lane: no reduction across lanes until the row is read. Several
    # elements of a lane at a time: the sum shrinks to a new maximum once for all of them.
    top = tl.full([LANES], -1.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for at in range(0, vocab, TILES * LANES):
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


@triton.jit
def _row_gradient(
    logits,
    target,
    normaliser,
    entropy,
    grad_logprob,
    grad_entropy,
    inverse_temperature,
    vocab,
    row_stride,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    chosen = tl.load(target + row)
    log_sum = tl.load(normaliser + row)
    slope = tl.load(grad_logprob + row)
    if WITH_ENTROPY:
        height = tl.load(entropy + row)
        slope_entropy = tl.load(grad_entropy + row)
    lane = tl.arange(0, BLOCK)
    for at in range(0, vocab, BLOCK):
        column = at + lane
        inside = column < vocab
        z = tl.load(start + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        log_p = z - log_sum
        p = tl.exp(log_p)
        value = tl.where(column == chosen, slope, 0.0) - p * slope
        if WITH_ENTROPY:
            value -= tl.where(p > 0, p * (log_p + height), 0.0) * slope_entropy
        tl.store(start + column, value * inverse_temperature, mask=inside)


@triton.jit
def _adamw(
    param,
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    squared_change,
    norm,
    count,
    max_norm,
    decay,
    step_size,
    root_correction,
    one_minus_beta1,
    beta2,
    eps,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    length = tl.load(norm)
    is_finite = length - length == 0.0
    grad_factor = tl.where(length > max_norm, max_norm / (length + 1.0e-6), 1.0)
    inside = inside & is_finite
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_factor
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    old = tl.load(master + at, mask=inside, other=0.0)
    m += (g - m) * one_minus_beta1
    v = v * beta2 + g * g * (1.0 - beta2)
    new = old * decay - step_size * m / (tl.sqrt(v) * root_correction + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, new, mask=inside)
    tl.store(param + at, new, mask=inside)
    change = tl.where(inside, new - old, 0.0)
    tl.store(squared_change + block, tl.sum(change * change, 0))


@triton.jit
def _gated(joint, target, inner, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(joint + token * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + (token * 2 + 1) * inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + token * inner + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _gated_backward(grad, joint, target, inner, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    first = token * 2 * inner + at
    g = tl.load(grad + token * inner + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joint + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + first + inner, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(target + first, g * up * share * (1.0 + gate * (1.0 - share)), mask=inside)
    tl.store(target + first + inner, g * gate * share, mask=inside)


@triton.jit
def _gated_pairs_backward(grad, pairs, target, inner, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < inner
    g = tl.load(grad + token * inner + at, mask=inside, other=0.0).to(tl.float32)
    both = first * 2 + tl.arange(0, 2 * BLOCK)  # in one piece, and taken apart in registers
    pair = tl.load(pairs + token * 2 * inner + both, mask=both < 2 * inner, other=0.0)
    gate, up = tl.split(tl.reshape(pair.to(tl.float32), [BLOCK, 2]))
    share = tl.sigmoid(gate)
    place = target + token * 2 * inner + at
    tl.store(place, g * up * share * (1.0 + gate * (1.0 - share)), mask=inside)
    tl.store(place + inner, g * gate * share, mask=inside)


def gated(joint_T2I: Tensor) -> Tensor:
    """See ``gate.gated``; contiguous."""
    tokens, inner = joint_T2I.shape[0], joint_T2I.shape[1] // 2
    target_TI = joint_T2I.new_empty(tokens, inner)
    grid = (tokens, triton.cdiv(inner, _BLOCK_I))
    _gated[grid](joint_T2I, target_TI, inner, BLOCK=_BLOCK_I, num_warps=4)
    return target_TI


def gated_backward(grad_TI: Tensor, joint_T2I: Tensor) -> Tensor:
    """See ``gate``; contiguous."""
    tokens, inner = grad_TI.shape
    target_T2I = torch.empty_like(joint_T2I)
    grid = (tokens, triton.cdiv(inner, _BLOCK_I))
    _gated_backward[grid](grad_TI, joint_T2I, target_T2I, inner, BLOCK=_BLOCK_I, num_warps=4)
    return target_T2I


def gated_pairs_backward(grad_TI: Tensor, pairs_T2I: Tensor) -> Tensor:
    """See ``gate``; contiguous."""
    tokens, inner = grad_TI.shape
    target_T2I = torch.empty_like(pairs_T2I)
    grid = (tokens, triton.cdiv(inner, _BLOCK_I))
    _gated_pairs_backward[grid](grad_TI, pairs_T2I, target_T2I, inner, BLOCK=_BLOCK_I, num_warps=4)
    return target_T2I


def row_stats(
    logits_CV: Tensor, target_C: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log of the normaliser and entropy of each row, in one reading.

    Args:
        logits_CV: [C, V], rows contiguous, before the temperature.
        target_C: int64 [C].
        temperature: logits are divided by it.
        with_entropy: otherwise the third result is 0.

    Returns:
        float32 [C] each.

    Source: the online normaliser, Milakov and Gimelshein 2018.
    """
    rows, vocab = logits_CV.shape
    logprob_C = logits_CV.new_empty(rows, dtype=torch.float32)
    normaliser_C = torch.empty_like(logprob_C)
    entropy_C = torch.zeros_like(logprob_C)
    _row_stats[(rows,)](
        logits_CV, target_C, logprob_C, normaliser_C, entropy_C, 1.0 / temperature, vocab,
        logits_CV.stride(0), WITH_ENTROPY=with_entropy, TILES=_STATS_TILES, LANES=_STATS_LANES,
        num_warps=_STATS_WARPS,
    )  # fmt: skip
    return logprob_C, normaliser_C, entropy_C


def row_gradient_(
    logits_CV: Tensor,
    target_C: Tensor,
    normaliser_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    *,
    temperature: float,
) -> Tensor:
    """Overwrite logits with the gradient by them; ``grad_entropy_C`` None: entropy is not used."""
    rows, vocab = logits_CV.shape
    _row_gradient[(rows,)](
        logits_CV, target_C, normaliser_C, entropy_C, grad_logprob_C.contiguous(),
        entropy_C if grad_entropy_C is None else grad_entropy_C.contiguous(), 1.0 / temperature,
        vocab, logits_CV.stride(0), WITH_ENTROPY=grad_entropy_C is not None, BLOCK=_BLOCK_V,
        num_warps=8,
    )  # fmt: skip
    return logits_CV


def adamw_(
    param_N: Tensor,
    master_N: Tensor,
    exp_avg_N: Tensor,
    exp_avg_sq_N: Tensor,
    grad_N: Tensor,
    norm: Tensor,
    *,
    max_norm: float,
    decay: float,
    step_size: float,
    root_correction: float,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """One AdamW step in place, ``param_N`` rounded from the new masters.

    Args:
        param_N: the forward pass's copy; the rest is float32.
        master_N: see above.
        exp_avg_N: see above.
        exp_avg_sq_N: see above.
        grad_N: before clipping; of any dtype.
        norm: float32 [1] length of the whole gradient, on the same device: read there, so that the
            host need not wait for it. Not finite: nothing is changed.
        max_norm: gradients are clipped to it.
        decay: factor of the masters, 1 - lr x weight decay.
        step_size: lr over the first bias correction.
        root_correction: 1 over the root of the second.
        betas: decay of the moments.
        eps: added to the root.

    Returns:
        Squared change of the masters: float32, one number per block; their sum is the whole.
    """
    count = master_N.numel()
    blocks = triton.cdiv(count, _BLOCK_N)
    squared_change = master_N.new_empty(blocks)
    _adamw[(blocks,)](
        param_N, master_N, exp_avg_N, exp_avg_sq_N, grad_N, squared_change, norm, count, max_norm,
        decay, step_size, root_correction, 1.0 - betas[0], betas[1], eps, BLOCK=_BLOCK_N,
        num_warps=8,
    )  # fmt: skip
    return squared_change
