"""Causal attention within the sequences of a row as one operation, with its gradient.

An operation of its own, so that a compiled layer holds it as one node. On a GPU it is
flash-attn-4's (``cute``); the plain form below says what it computes.

Legend: T queries of the row, N keys, H heads, K key/value heads, E head size, S sequences,
A queries of one sequence, B its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]


class Rows(NamedTuple):
    """Where the sequences of a row lie, and what scores are multiplied by; see ``flash``."""

    query_ends_S1: Tensor
    key_ends_S1: Tensor
    longest: int
    scale: float

    @property
    def is_rectangle(self) -> bool:
        """All sequences are equally long: there are no ends."""
        return not self.query_ends_S1.numel()


@torch.library.custom_op("milepost::flash", mutates_args=())
def flash(
    query_THE: Tensor,
    key_NKE: Tensor,
    value_NKE: Tensor,
    query_ends_S1: Tensor,
    key_ends_S1: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its own sequence that do not come after it.

    The queries of a sequence are its last ones: where there are fewer than keys, the first query
    sees all keys but as many as there are queries behind it.

    Args:
        query_THE: [T, H, E], sequence after sequence.
        key_NKE: [N, K, E]; query head h reads key head h * K // H.
        value_NKE: [N, K, E].
        query_ends_S1: int32 [S + 1] where each sequence's queries begin, then T; [0]: all sequences
            have ``longest`` queries and as many keys.
        key_ends_S1: the same for keys.
        longest: keys of the longest sequence.
        scale: of the scores.

    Returns:
        [T, H, E], and the log of the softmax's normaliser, float32: [H, T], or [S, H, longest]
        where there are no ends. Contiguous, gradients too, however the inputs lie: what graphs are
        made for, and nothing looks again when they run.

    Source: Dao et al. 2022; Shah et al. 2024.
    """
    rows = Rows(query_ends_S1, key_ends_S1, longest, scale)
    if query_THE.is_cuda:
        from runtime.trainer.torch import cute

        return cute.attention(query_THE, key_NKE, value_NKE, rows)
    return plain_attention(query_THE, key_NKE, value_NKE, rows)


@torch.library.custom_op("milepost::flash_backward", mutates_args=())
def _flash_backward(
    grad_THE: Tensor,
    query_THE: Tensor,
    key_NKE: Tensor,
    value_NKE: Tensor,
    out_THE: Tensor,
    log_sum: Tensor,
    query_ends_S1: Tensor,
    key_ends_S1: Tensor,
    longest: int,
    scale: float,
) -> Three:
    rows = Rows(query_ends_S1, key_ends_S1, longest, scale)
    backward = _plain_backward
    if query_THE.is_cuda:
        from runtime.trainer.torch import cute

        backward = cute.attention_backward
    grad_THE = grad_THE.contiguous()
    return backward(grad_THE, (query_THE, key_NKE, value_NKE), out_THE, log_sum, rows)


def plain_attention(
    query_THE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """See ``flash``; sequence after sequence, in float32 at least."""
    out_THE = query_THE.new_empty(query_THE.shape)
    log_sum_HT = query_THE.new_empty(
        query_THE.shape[1], query_THE.shape[0], dtype=_wide(query_THE.dtype)
    )
    for at, of in _sequences(query_THE, rows):
        scores_HAB = _scores(query_THE[at], key_NKE[of], rows.scale)
        log_sum_HT[:, at] = scores_HAB.logsumexp(-1)
        value_BHE = _spread(value_NKE[of], query_THE.shape[1])
        out_THE[at] = torch.einsum("hab,bhe->ahe", scores_HAB.softmax(-1), value_BHE)
    if rows.is_rectangle:
        log_sum_SHL = log_sum_HT.unflatten(1, (-1, rows.longest)).transpose(0, 1)
        return out_THE, log_sum_SHL.contiguous()
    return out_THE, log_sum_HT


def _plain_backward(
    grad_THE: Tensor, inputs: Three, out_THE: Tensor, log_sum: Tensor, rows: Rows
) -> Three:
    query_THE, key_NKE, value_NKE = inputs
    heads, groups = query_THE.shape[1], key_NKE.shape[1]
    by_query, by_key, by_value = (x.new_empty(x.shape) for x in (query_THE, key_NKE, value_NKE))
    log_sum_HT = log_sum if log_sum.dim() == 2 else log_sum.transpose(0, 1).flatten(1)
    for at, of in _sequences(query_THE, rows):
        grad, query = grad_THE[at].to(log_sum.dtype), query_THE[at].to(log_sum.dtype)
        key, value = (_spread(x[of], heads) for x in (key_NKE, value_NKE))
        p_HAB = (_scores(query_THE[at], key_NKE[of], rows.scale) - log_sum_HT[:, at, None]).exp()
        # d score = p (d p - sum of p d p), and that sum is what the output's gradient has in common
        # with the output.
        common_HA1 = (grad * out_THE[at]).sum(-1).t()[..., None]
        by_p_HAB = torch.einsum("ahe,bhe->hab", grad, value)
        by_score_HAB = p_HAB * (by_p_HAB - common_HA1) * rows.scale
        by_query[at] = torch.einsum("hab,bhe->ahe", by_score_HAB, key)
        by_key[of] = _gathered(torch.einsum("hab,ahe->bhe", by_score_HAB, query), groups)
        by_value[of] = _gathered(torch.einsum("hab,ahe->bhe", p_HAB, grad), groups)
    return by_query, by_key, by_value


def _sequences(query_THE: Tensor, rows: Rows) -> Iterator[tuple[slice, slice]]:
    """Where each sequence's queries and keys lie."""
    if rows.is_rectangle:
        queries = keys = list(range(0, query_THE.shape[0] + 1, rows.longest))
    else:
        queries, keys = rows.query_ends_S1.tolist(), rows.key_ends_S1.tolist()
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        yield slice(a, b), slice(c, d)


def _scores(query_AHE: Tensor, key_BKE: Tensor, scale: float) -> Tensor:
    """[H, A, B] before the softmax; minus infinity where a query may not look."""
    queries, heads = query_AHE.shape[:2]
    keys = key_BKE.shape[0]
    query = query_AHE.to(_wide(query_AHE.dtype))
    scores = torch.einsum("ahe,bhe->hab", query, _spread(key_BKE, heads)) * scale
    unseen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(unseen.triu(keys - queries + 1), float("-inf"))


def _spread(x_BKE: Tensor, heads: int) -> Tensor:
    return x_BKE.to(_wide(x_BKE.dtype)).repeat_interleave(heads // x_BKE.shape[1], 1)


def _gathered(x_BHE: Tensor, groups: int) -> Tensor:
    return x_BHE.unflatten(1, (groups, -1)).sum(2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@flash.register_fake
def _(
    query_THE: Tensor,
    _key: Tensor,
    _value: Tensor,
    query_ends_S1: Tensor,
    _ends: Tensor,
    longest: int,
    _scale: float,
) -> tuple[Tensor, Tensor]:
    tokens, heads = query_THE.shape[:2]
    has_ends = query_ends_S1.shape[0] != 0
    shape = (heads, tokens) if has_ends else (tokens // longest, heads, longest)
    log_sum = query_THE.new_empty(shape, dtype=_wide(query_THE.dtype))
    return query_THE.new_empty(query_THE.shape), log_sum


@_flash_backward.register_fake
def _(_grad: Tensor, query_THE: Tensor, key_NKE: Tensor, value_NKE: Tensor, *_: Any) -> Three:
    by_query, by_key, by_value = (x.new_empty(x.shape) for x in (query_THE, key_NKE, value_NKE))
    return by_query, by_key, by_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, query_ends, key_ends, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, query_ends, key_ends)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_THE: Tensor, _log_sum: None) -> tuple[Tensor | None, ...]:
    by_inputs = _flash_backward(grad_THE, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return *by_inputs, *(None,) * 4


flash.register_autograd(_backward, setup_context=_keep)
