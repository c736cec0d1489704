"""From joint projections to what attention takes: norms of queries and keys, and the rotation.

One reading and one writing of the joint tensor, forward and backward. A compiler makes eight
kernels of the backward pass, three times the traffic: rotation, norm, the norm's weight and the
joining of three gradients each pass over memory by themselves.

Legend: T tokens, H query heads, K key/value heads, E head size (even), W = (H + 2 K) E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("milepost::rotate_qkv", mutates_args=())
def rotate_qkv(
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    num_queries: int,
    eps: float,
) -> Three:
    """Queries and keys, RMS-normed per head where there are norms, then rotated; values copied.

    Args:
        joint_TW: [T, W] queries, keys, values.
        query_norm_E: [E] weight of the queries' norm; None: there is none.
        key_norm_E: [E] the same for keys.
        cos_TE: [T, E] of the rotation, both halves.
        sin_TE: see above.
        num_queries: H.
        eps: of the norms.

    Returns:
        [T, H, E], [T, K, E] and [T, K, E] in the dtype of ``joint_TW``.

    Source: Zhang and Sennrich 2019 (RMS norm); Su et al. 2021 (rotary embedding, as two halves).
    """
    if joint_TW.is_cuda:
        from runtime.trainer.torch import rotary_kernels

        return rotary_kernels.rotate_qkv(
            joint_TW.contiguous(), query_norm_E, key_norm_E, cos_TE.contiguous(),
            sin_TE.contiguous(), num_queries, eps,
        )  # fmt: skip
    return _plain(joint_TW, query_norm_E, key_norm_E, cos_TE, sin_TE, num_queries, eps)


@torch.library.custom_op("milepost::rotate_qkv_backward", mutates_args=())
def _rotate_qkv_backward(
    grad_query_THE: Tensor,
    grad_key_TKE: Tensor,
    grad_value_TKE: Tensor,
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    eps: float,
) -> Three:
    """Gradients by ``joint_TW`` and by both norms' weights; those are empty without norms."""
    query = grad_query_THE.contiguous()
    key, value = grad_key_TKE.contiguous(), grad_value_TKE.contiguous()
    if joint_TW.is_cuda:
        from runtime.trainer.torch import rotary_kernels

        return rotary_kernels.rotate_qkv_backward(
            query, key, value, joint_TW.contiguous(), query_norm_E, key_norm_E, cos_TE.contiguous(),
            sin_TE.contiguous(), eps,
        )  # fmt: skip
    return _plain_backward(
        query, key, value, joint_TW, query_norm_E, key_norm_E, cos_TE, sin_TE, eps
    )


def _plain(
    joint_TW: Any,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    num_queries: int,
    eps: float,
) -> Three:
    heads = joint_TW.unflatten(-1, (-1, cos_TE.shape[-1]))
    num_keys = (heads.shape[1] - num_queries) // 2
    query, key, value = heads.split([num_queries, num_keys, num_keys], 1)

    def rotate(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.float()
        if weight is not None:
            x = x * _rms_scale(x, eps) * weight
        return (x * cos_TE[:, None] + _turned(x) * sin_TE[:, None]).to(joint_TW.dtype)

    return rotate(query, query_norm_E), rotate(key, key_norm_E), value.clone()


def _plain_backward(
    grad_query_THE: Tensor,
    grad_key_TKE: Tensor,
    grad_value_TKE: Tensor,
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    eps: float,
) -> Three:
    num_queries, num_keys = grad_query_THE.shape[1], grad_key_TKE.shape[1]
    heads = joint_TW.unflatten(-1, (-1, cos_TE.shape[-1]))
    query, key, _ = heads.split([num_queries, num_keys, num_keys], 1)

    def back(grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        grad, x = grad.float(), x.float()
        # The rotation's transpose is the rotation the other way round.
        grad = grad * cos_TE[:, None] - _turned(grad * sin_TE[:, None])
        if weight is None:
            return grad, joint_TW.new_empty(0)
        scale = _rms_scale(x, eps)
        x = x * scale
        by_weight = (grad * x).sum((0, 1))
        grad = grad * weight
        return (grad - x * (grad * x).mean(-1, keepdim=True)) * scale, by_weight.to(weight.dtype)

    by_query, by_query_norm = back(grad_query_THE, query, query_norm_E)
    by_key, by_key_norm = back(grad_key_TKE, key, key_norm_E)
    joint = torch.cat([by_query, by_key, grad_value_TKE.float()], 1)
    return joint.flatten(1).to(joint_TW.dtype), by_query_norm, by_key_norm


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


@rotate_qkv.register_fake
def _(
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    num_queries: int,
    eps: float,
) -> Three:
    tokens, size = cos_TE.shape
    num_keys = (joint_TW.shape[1] // size - num_queries) // 2
    sizes = (num_queries, num_keys, num_keys)
    query, key, value = (joint_TW.new_empty(tokens, n, size) for n in sizes)
    return query, key, value


@_rotate_qkv_backward.register_fake
def _(
    grad_query_THE: Tensor,
    grad_key_TKE: Tensor,
    grad_value_TKE: Tensor,
    joint_TW: Tensor,
    query_norm_E: Tensor | None,
    key_norm_E: Tensor | None,
    cos_TE: Tensor,
    sin_TE: Tensor,
    eps: float,
) -> Three:
    norms = [
        joint_TW.new_empty(0) if w is None else torch.empty_like(w)
        for w in (query_norm_E, key_norm_E)
    ]
    return joint_TW.new_empty(joint_TW.shape), norms[0], norms[1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    joint_TW, query_norm_E, key_norm_E, cos_TE, sin_TE, _, eps = inputs
    ctx.save_for_backward(joint_TW, query_norm_E, key_norm_E, cos_TE, sin_TE)
    ctx.eps = eps


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a recomputed layer gives its tensors a single time
    joint, query_norm, key_norm = _rotate_qkv_backward(*grads, *saved, ctx.eps)
    if saved[1] is None:
        return joint, *(None,) * 6
    return joint, query_norm, key_norm, *(None,) * 4


rotate_qkv.register_autograd(_backward, setup_context=_keep)
