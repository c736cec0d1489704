"""Log-probs and entropy of chosen tokens without ever holding all logits.

Legend: R rows, C rows of one chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _ChunkedHead(torch.autograd.Function):
    """Forward keeps one fp32 number per row; backward makes each chunk's logits a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        target_R: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden_RD.shape[0]
        logprob_R = hidden_RD.new_empty(rows, dtype=torch.float32)
        normaliser_R = torch.empty_like(logprob_R)
        entropy_R = torch.zeros_like(logprob_R)
        for at in range(0, rows, chunk):
            part = slice(at, at + chunk)
            logits_CV = _logits(hidden_RD[part], weight_VD, temperature)
            normaliser_R[part] = logits_CV.logsumexp(-1)
            chosen = logits_CV.gather(1, target_R[part, None]).squeeze(1)
            logprob_R[part] = chosen - normaliser_R[part]
            if with_entropy:
                p_CV = (logits_CV - normaliser_R[part, None]).exp_()
                entropy_R[part] = normaliser_R[part] - (p_CV * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_RD, weight_VD, target_R, normaliser_R, entropy_R)
        ctx.temperature, ctx.chunk, ctx.with_entropy = temperature, chunk, with_entropy
        return logprob_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob_R, grad_entropy_R = grads
        hidden_RD, weight_VD, target_R, normaliser_R, entropy_R = ctx.saved_tensors
        grad_hidden_RD = torch.empty_like(hidden_RD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for at in range(0, hidden_RD.shape[0], ctx.chunk):
            part = slice(at, at + ctx.chunk)
            hidden_CD = hidden_RD[part]
            logprob_CV = _logits(hidden_CD, weight_VD, ctx.temperature)
            logprob_CV -= normaliser_R[part, None]
            p_CV = logprob_CV.exp()
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            scale_C1 = grad_logprob_R[part, None]
            grad_CV = p_CV * -scale_C1
            if ctx.with_entropy:
                inner_CV = logprob_CV.add_(entropy_R[part, None]).mul_(p_CV)
                grad_CV -= inner_CV.mul_(grad_entropy_R[part, None])
            grad_CV.scatter_add_(1, target_R[part, None], scale_C1)
            grad_CV = (grad_CV / ctx.temperature).to(hidden_CD.dtype)
            grad_hidden_RD[part] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.t() @ hidden_CD
        return grad_hidden_RD, grad_weight_VD.to(weight_VD.dtype), None, None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    # The product in the model's dtype, the rest in fp32: what engines do.
    logits = (hidden_CD @ weight_VD.t()).float()
    return logits if temperature == 1.0 else logits / temperature


def chunked_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    *,
    temperature: float,
    chunk: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``target_R`` and entropies of their distributions, at ``temperature``.

    Args:
        hidden_RD: [R, D] last hidden states, in the model's dtype.
        weight_VD: [V, D] of the output layer; it has no bias.
        target_R: int64 [R].
        temperature: logits are divided by it, as in sampling.
        chunk: rows whose logits exist at one time.
        with_entropy: otherwise the second result is 0 and has no gradient.

    Returns:
        float32 [R] and float32 [R], natural log; both carry gradients.
    """
    result = _ChunkedHead.apply(hidden_RD, weight_VD, target_R, temperature, chunk, with_entropy)
    return cast("tuple[Tensor, Tensor]", result)
