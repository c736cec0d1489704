"""Log-probs and entropy of chosen tokens without ever holding all logits in fp32.

Legend: R rows, C rows of one chunk, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from runtime.trainer.torch import cute

_KEPT_BYTES = {"cuda": 5 << 30, "cpu": 64 << 20}
"""Logits, in the model's dtype, that may wait for the backward pass. Making them a second time is a
third of the output layer's forward and backward, 5 % of a whole step of a 0.6 B model."""


class _ChunkedHead(torch.autograd.Function):
    """Forward keeps two fp32 numbers per row, and the logits of as many rows as may be kept.

    Backward turns kept logits into their gradient in place, and makes the others again in chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        target_R: Tensor,
        also_RK: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        num_kept: int,
        takes_cute: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_RD.shape[0]
        kept_KV = hidden_RD.new_empty(num_kept, weight_VD.shape[0])
        parts: list[tuple[Tensor, ...]] = []
        for part in _chunks(rows, num_kept, chunk):
            kept = kept_KV[part] if part.start < num_kept else None
            logits_CV = _product(hidden_RD[part], weight_VD, kept, takes_cute=takes_cute)
            stats = _row_stats(logits_CV, target_R[part], temperature, with_entropy)
            picked_CK = logits_CV.gather(1, also_RK[part]).float() / temperature
            parts.append((*stats, picked_CK - stats[1][:, None]))
        logprob_R, normaliser_R, entropy_R, logprob_RK = (
            torch.cat(p) for p in zip(*parts, strict=True)
        )
        ctx.save_for_backward(
            hidden_RD, weight_VD, target_R, also_RK, normaliser_R, entropy_R, kept_KV
        )
        ctx.temperature, ctx.chunk, ctx.with_entropy = temperature, chunk, with_entropy
        ctx.takes_cute = takes_cute
        return logprob_R, entropy_R, logprob_RK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob_R, grad_entropy_R, grad_logprob_RK = grads
        saved = ctx.saved_tensors
        hidden_RD, weight_VD, target_R, also_RK, normaliser_R, entropy_R, kept_KV = saved
        wants_weight = ctx.needs_input_grad[1]
        rows, num_kept = hidden_RD.shape[0], kept_KV.shape[0]
        grad_hidden_RD = torch.empty_like(hidden_RD)

        def gradient(part: slice, logits_CV: Tensor) -> Tensor:
            grad_CK = grad_logprob_RK[part]
            # Every log-prob takes its share of the same softmax away, so that is done once.
            more_C = grad_CK.sum(1) if grad_CK.shape[1] else None
            grad_C = grad_logprob_R[part]
            made_CV = _row_gradient(
                logits_CV,
                target_R[part],
                normaliser_R[part],
                entropy_R[part],
                grad_C if more_C is None else grad_C + more_C,
                grad_entropy_R[part] if ctx.with_entropy else None,
                ctx.temperature,
            )
            if more_C is not None:
                place = torch.cat([target_R[part][:, None], also_RK[part]], 1)
                amount = torch.cat([-more_C[:, None], grad_CK], 1) / ctx.temperature
                made_CV.scatter_add_(1, place, amount.to(made_CV.dtype))
            torch.mm(made_CV, weight_VD, out=grad_hidden_RD[part])
            return made_CV

        whole = slice(0, num_kept)
        kept_grad_KV = gradient(whole, kept_KV) if num_kept else kept_KV
        if num_kept == rows:  # the usual case: one product, summed in fp32 inside it
            grad_VD = kept_grad_KV.t() @ hidden_RD if wants_weight else None
            return grad_hidden_RD, grad_VD, *(None,) * 7
        grad_weight_VD = (kept_grad_KV.t() @ hidden_RD[whole]).float() if wants_weight else None
        for part in _chunks(rows, num_kept, ctx.chunk):
            if part.start >= num_kept:
                again_CV = _product(hidden_RD[part], weight_VD, takes_cute=ctx.takes_cute)
                made_CV = gradient(part, again_CV)
                if grad_weight_VD is not None:
                    grad_weight_VD += made_CV.t() @ hidden_RD[part]
        grad_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_RD, grad_VD, *(None,) * 7


def _product(
    hidden_CD: Tensor, weight_VD: Tensor, out_CV: Tensor | None = None, *, takes_cute: bool
) -> Tensor:
    if takes_cute and hidden_CD.shape[0]:
        return cute.product(hidden_CD, weight_VD, out_CV)
    return torch.mm(hidden_CD, weight_VD.t(), out=out_CV)


def _chunks(rows: int, num_kept: int, chunk: int) -> list[slice]:
    """Rows in chunks, none of which is kept only in part; no rows are one empty chunk."""
    if not rows:
        return [slice(0, 0)]
    return [slice(at, min(at + chunk, num_kept)) for at in range(0, num_kept, chunk)] + [
        slice(at, min(at + chunk, rows)) for at in range(num_kept, rows, chunk)
    ]


def _row_stats(
    logits_CV: Tensor, target_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, log of the normaliser, entropy or 0) per row, float32."""
    if logits_CV.is_cuda and logits_CV.shape[0]:
        from runtime.trainer.torch import kernels

        return kernels.row_stats(
            logits_CV, target_C, temperature=temperature, with_entropy=with_entropy
        )
    logits_CV = _scaled(logits_CV, temperature)
    normaliser_C = logits_CV.logsumexp(-1)
    logprob_C = logits_CV.gather(1, target_C[:, None]).squeeze(1) - normaliser_C
    entropy_C = torch.zeros_like(logprob_C)
    if with_entropy:
        p_CV = (logits_CV - normaliser_C[:, None]).exp_()
        entropy_C = normaliser_C - (p_CV * logits_CV).sum(-1)
    return logprob_C, normaliser_C, entropy_C


def _row_gradient(
    logits_CV: Tensor,
    target_C: Tensor,
    normaliser_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient by the logits, in their dtype; the logits are lost."""
    if logits_CV.is_cuda:
        from runtime.trainer.torch import kernels

        return kernels.row_gradient_(
            logits_CV, target_C, normaliser_C, entropy_C, grad_logprob_C, grad_entropy_C,
            temperature=temperature,
        )  # fmt: skip
    logprob_CV = _scaled(logits_CV, temperature)
    logprob_CV = logprob_CV.sub_(normaliser_C[:, None])
    p_CV = logprob_CV.exp()
    # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
    scale_C1 = grad_logprob_C[:, None]
    grad_CV = p_CV * -scale_C1
    if grad_entropy_C is not None:
        inner_CV = logprob_CV.add_(entropy_C[:, None]).mul_(p_CV)
        grad_CV -= inner_CV.mul_(grad_entropy_C[:, None])
    grad_CV.scatter_add_(1, target_C[:, None], scale_C1)
    return (grad_CV / temperature).to(logits_CV.dtype)


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    # The product in the model's dtype, the rest in fp32: what engines do.
    logits_CV = logits_CV.float()
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def chunked_logprobs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    target_R: Tensor,
    *,
    temperature: float,
    chunk: int,
    with_entropy: bool,
    also_RK: Tensor | None = None,
    kept_bytes: int | None = None,
    takes_cute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of ``target_R`` and entropies of their distributions, at ``temperature``.

    Args:
        hidden_RD: [R, D] last hidden states, in the model's dtype.
        weight_VD: [V, D] of the output layer; it has no bias.
        target_R: int64 [R].
        temperature: logits are divided by it, as in sampling.
        chunk: rows whose logits exist at one time, beside kept ones.
        with_entropy: otherwise the second result is 0 and has no gradient.
        also_RK: int64 [R, K] further tokens of each row whose log-probs are wanted; None: K = 0.
        kept_bytes: logits that may be kept for the backward pass; None: 5 GiB on a GPU, 64 MiB on
            a CPU.
        takes_cute: the product by ``cute`` where it takes this weight.

    Returns:
        float32 [R], [R] and [R, K], natural log; all carry gradients.
    """
    if also_RK is None:
        also_RK = target_R.new_empty(target_R.shape[0], 0)
    limit = _KEPT_BYTES.get(hidden_RD.device.type, 0) if kept_bytes is None else kept_bytes
    row_bytes = weight_VD.shape[0] * hidden_RD.element_size()
    num_kept = min(hidden_RD.shape[0], limit // row_bytes) if torch.is_grad_enabled() else 0
    result = _ChunkedHead.apply(
        hidden_RD, weight_VD, target_R, also_RK, temperature, chunk, with_entropy, num_kept,
        takes_cute and hidden_RD.is_cuda and cute.takes_product(weight_VD),
    )  # fmt: skip
    return cast("tuple[Tensor, Tensor, Tensor]", result)


@torch.no_grad()
def likeliest(
    hidden_RD: Tensor, weight_VD: Tensor, count: int, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest tokens of each row: log-probs float32 [R, K], ids int64 [R, K]."""
    parts: list[tuple[Tensor, Tensor]] = []
    for part in _chunks(hidden_RD.shape[0], 0, chunk):
        logits_CV = _scaled(hidden_RD[part] @ weight_VD.t(), temperature)
        top = logits_CV.topk(count, -1)
        parts.append((top.values - logits_CV.logsumexp(-1, keepdim=True), top.indices))
    logprob_RK, id_RK = (torch.cat(p) for p in zip(*parts, strict=True))
    return logprob_RK, id_RK
