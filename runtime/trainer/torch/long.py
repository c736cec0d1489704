"""Weights of one rank as few long tensors: the named ones are views of them.

AdamW works element by element, so with masters, moments, gradients and the forward pass's copy each
in one piece an optimizer step is one kernel that reads and writes every byte once, where a call per
tensor and purpose (clip, step, round, measure the change) moves three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Legend: N elements of all weights, each weight's first one aligned.

_ALIGNMENT = 64
"""Elements; matrix products want rows that start at 16 bytes or more."""
_BATCH = 32 << 20
"""Elements of gradients that wait to be moved together: small ones are slow one by one."""


class LongWeights:
    """Parameters in ``dtype`` over fp32 masters; gradients add up in fp32."""

    def __init__(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Take over ``params``: their data become views in ``dtype``.

        Args:
            params: in fp32, all on one device.
            dtype: of the forward pass.
        """
        self._params = list(params)
        self._places: list[slice] = []
        self._gaps: list[slice] = []
        at = 0
        for param in params:
            end = at + param.numel()
            self._places.append(slice(at, end))
            at += -(-param.numel() // _ALIGNMENT) * _ALIGNMENT
            if at > end:
                self._gaps.append(slice(end, at))
        device = params[0].device
        self.master_N = torch.zeros(at, dtype=torch.float32, device=device)
        self.param_N = torch.zeros(at, dtype=dtype, device=device)
        self.masters: list[nn.Parameter] = []
        self._grad_N: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._num_waiting = 0
        for param, master, rounded in zip(
            params, self.named(self.master_N), self.named(self.param_N), strict=True
        ):
            master.copy_(param.detach())
            rounded.copy_(master)
            self.masters.append(nn.Parameter(master))
            param.data = rounded
        for at, param in enumerate(params):
            param.register_post_accumulate_grad_hook(self._moves_gradient(at))

    def named(self, long_N: Tensor) -> list[Tensor]:
        """The part of each parameter in a long tensor, in its shape."""
        return [
            long_N[place].view(param.shape)
            for place, param in zip(self._places, self._params, strict=True)
        ]

    def _moves_gradient(self, at: int) -> Any:
        """A hook that moves a gradient to its master once it is whole."""

        def move(param: Tensor) -> None:
            gradient, master = param.grad, self.masters[at]
            param.grad = None
            if gradient is None:
                return
            if master.grad is not None:
                self.settle()
                master.grad.add_(gradient)
                return
            # Made late and dropped after each step: activations and this do not peak together.
            if self._grad_N is None:
                self._grad_N = torch.empty_like(self.master_N)
                for gap in self._gaps:
                    self._grad_N[gap].zero_()
            master.grad = self._grad_N[self._places[at]].view(param.shape)
            self._waiting.append((master.grad, gradient))
            self._num_waiting += gradient.numel()
            if self._num_waiting > _BATCH:
                self.settle()

        return move

    @torch.no_grad()
    def settle(self) -> None:
        """Finish moving; before this a master's ``grad`` may be there and not yet written."""
        if self._waiting:
            copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            copy([to for to, _ in self._waiting], [g for _, g in self._waiting])
        self._waiting.clear()
        self._num_waiting = 0

    def gradient(self) -> Tensor | None:
        """All gradients, 0 where a weight has none; None without any."""
        if self._grad_N is None:
            return None
        self.settle()
        if any(master.grad is None for master in self.masters):
            for place, master in zip(self._places, self.masters, strict=True):
                if master.grad is None:
                    self._grad_N[place].zero_()
        return self._grad_N

    def drop_gradient(self) -> None:
        """Free it; the masters' own ``grad`` are dropped by who holds them."""
        self._grad_N = None
        self._waiting.clear()
        self._num_waiting = 0

    def round_masters(self) -> None:
        """Bring the forward pass's copy up to date."""
        self.param_N.copy_(self.master_N)
