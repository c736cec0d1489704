"""The gated activation of an MLP whose gate and up projections are one product.

Legend: T tokens, D hidden size, I inner size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


@torch.library.custom_op("milepost::gated", mutates_args=())
def gated(joint_T2I: Tensor) -> Tensor:
    """silu(gate) x up, [T, I], of gate and up side by side, [T, 2 I].

    Source: Shazeer 2020 (SwiGLU).
    """
    if joint_T2I.is_cuda:
        from runtime.trainer.torch import kernels

        return kernels.gated(joint_T2I.contiguous())
    gate, up = joint_T2I.float().chunk(2, -1)
    return (silu(gate) * up).to(joint_T2I.dtype)


@torch.library.custom_op("milepost::gated_backward", mutates_args=())
def _gated_backward(grad_TI: Tensor, joint_T2I: Tensor) -> Tensor:
    if joint_T2I.is_cuda:
        from runtime.trainer.torch import kernels

        return kernels.gated_backward(grad_TI.contiguous(), joint_T2I.contiguous())
    gate, up = joint_T2I.float().chunk(2, -1)
    share = torch.sigmoid(gate)
    grad_TI = grad_TI.float()
    by_gate = grad_TI * up * share * (1.0 + gate * (1.0 - share))
    return torch.cat([by_gate, grad_TI * gate * share], -1).to(joint_T2I.dtype)


@gated.register_fake
def _(joint_T2I: Tensor) -> Tensor:
    return joint_T2I.new_empty(joint_T2I.shape[0], joint_T2I.shape[1] // 2)


@_gated_backward.register_fake
def _(grad_TI: Tensor, joint_T2I: Tensor) -> Tensor:
    return joint_T2I.new_empty(joint_T2I.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TI: Tensor) -> Tensor:
    return _gated_backward(grad_TI, *ctx.saved_tensors)


gated.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("milepost::gated_product", mutates_args=())
def gated_product(x_TD: Tensor, weight_2ID: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
    """The product with gate and up, and the activation before anything of it is written.

    Args:
        x_TD: [T, D].
        weight_2ID: [2 I, D] the gate's weight and then up's.
        keeps: a gradient will be asked for.

    Returns:
        silu(gate) x up, [T, I]; and what its gradient needs: gate and up of each in turn, [T, 2 I],
        or [0].
    """
    if x_TD.is_cuda:
        from runtime.trainer.torch import cute

        return cute.gated_product(x_TD.contiguous(), weight_2ID.contiguous(), keeps=keeps)
    return plain_product(x_TD, weight_2ID, keeps=keeps)


def plain_product(x_TD: Tensor, weight_2ID: Tensor, *, keeps: bool) -> tuple[Tensor, Tensor]:
    """See ``gated_product``."""
    gate, up = linear(x_TD, weight_2ID).chunk(2, -1)
    out = (silu(gate.float()) * up.float()).to(x_TD.dtype)
    return out, torch.stack([gate, up], -1).flatten(1) if keeps else x_TD.new_empty(0)


@torch.library.custom_op("milepost::gated_pairs_backward", mutates_args=())
def gated_pairs_backward(grad_TI: Tensor, pairs_T2I: Tensor) -> Tensor:
    """Gradient by gate and up, side by side as ``gated`` takes them, of what lies in turn."""
    if pairs_T2I.is_cuda:
        from runtime.trainer.torch import kernels

        return kernels.gated_pairs_backward(grad_TI.contiguous(), pairs_T2I.contiguous())
    return _gated_backward(grad_TI, torch.cat([pairs_T2I[:, ::2], pairs_T2I[:, 1::2]], 1))


@gated_product.register_fake
def _(x_TD: Tensor, weight_2ID: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
    tokens, both = x_TD.shape[0], weight_2ID.shape[0]
    return x_TD.new_empty(tokens, both // 2), x_TD.new_empty((tokens, both) if keeps else (0,))


@gated_pairs_backward.register_fake
def _(grad_TI: Tensor, pairs_T2I: Tensor) -> Tensor:
    return pairs_T2I.new_empty(pairs_T2I.shape)


def _keep_pairs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TD, weight_2ID, _ = inputs
    ctx.save_for_backward(x_TD, weight_2ID, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _product_backward(ctx: Any, grad_TI: Tensor, _pairs: None) -> tuple[Tensor | None, ...]:
    x_TD, weight_2ID, pairs_T2I = ctx.saved_tensors
    joint_T2I = gated_pairs_backward(grad_TI, pairs_T2I)
    by_x = joint_T2I @ weight_2ID if ctx.needs_input_grad[0] else None
    by_weight = joint_T2I.t() @ x_TD if ctx.needs_input_grad[1] else None
    return by_x, by_weight, None


gated_product.register_autograd(_product_backward, setup_context=_keep_pairs)
