"""The gated activation of an MLP whose gate and up projections are one product.

Legend: T tokens, I inner size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


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
