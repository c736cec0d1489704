"""Weights of one rank as few long tensors: the named ones are views of them.

AdamW works element by element, so with masters, moments, gradients and the forward pass's copy each
in one piece an optimizer step is one kernel that reads and writes every byte once, where a call per
tensor and purpose (clip, step, round, measure the change) moves three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Legend: N elements of all weights, each weight's first one aligned.

T = TypeVar("T")

ALIGNMENT = 64
"""Elements; matrix products want rows that start at 16 bytes or more."""
_BATCH = 32 << 20
"""Elements of gradients that wait to be moved together: small ones are slow one by one."""


class LongWeights:
    """Parameters in ``dtype`` over fp32 masters; gradients that add up do so in fp32."""

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
            at += -(-param.numel() // ALIGNMENT) * ALIGNMENT
            if at > end:
                self._gaps.append(slice(end, at))
        device = params[0].device
        self.master_N = torch.zeros(at, dtype=torch.float32, device=device)
        self.param_N = torch.zeros(at, dtype=dtype, device=device)
        self.masters: list[nn.Parameter] = []
        self._grad_N: Tensor | None = None
        self._grads: list[Tensor | None] = [None] * len(self._params)
        """Views of it, where a gradient came."""
        self._grad_dtype = torch.float32
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

    def runs(self, kinds: Sequence[T]) -> list[tuple[slice, T]]:
        """Neighbouring weights of one kind as one part of the long tensors, gaps between included.

        Args:
            kinds: of each weight, in their order.
        """
        found: list[tuple[slice, T]] = []
        for at, kind in enumerate(kinds):
            start = self._places[at].start
            more = at + 1 < len(kinds)
            end = self._places[at + 1].start if more else self.master_N.numel()
            if found and found[-1][1] == kind:
                start = found.pop()[0].start
            found.append((slice(start, end), kind))
        return found

    def expect(self, *, num_rows: int) -> None:
        """Say how many backward passes add up: one alone is as exact in the passes' own dtype.

        Takes effect when the first gradient comes after ``drop_gradient``.
        """
        self._grad_dtype = self.param_N.dtype if num_rows == 1 else self.master_N.dtype

    def _moves_gradient(self, at: int) -> Any:
        """A hook that moves a gradient into the long one once it is whole."""

        def move(param: Tensor) -> None:
            gradient, place = param.grad, self._grads[at]
            param.grad = None
            if gradient is None:
                return
            if place is not None:
                self.settle()
                self._add(at, gradient)
                return
            # Made late and dropped after each step: activations and this do not peak together.
            if self._grad_N is None:
                self._grad_N = torch.empty_like(self.master_N, dtype=self._grad_dtype)
                for gap in self._gaps:
                    self._grad_N[gap].zero_()
            place = self._grad_N[self._places[at]].view(param.shape)
            self._grads[at] = place
            self._waiting.append((place, gradient))
            self._num_waiting += gradient.numel()
            if self._num_waiting > _BATCH:
                self.settle()

        return move

    def _add(self, at: int, gradient: Tensor) -> None:
        """Add to a gradient that is there, in fp32 whatever was expected."""
        if self._grad_N is not None and self._grad_N.dtype != self.master_N.dtype:
            self._grad_N = self._grad_N.to(self.master_N.dtype)
            for i, place in enumerate(self.named(self._grad_N)):
                if self._grads[i] is not None:
                    self._grads[i] = place
        place = self._grads[at]
        if place is not None:
            place.add_(gradient)

    @torch.no_grad()
    def settle(self) -> None:
        """Finish moving; before this a gradient may be there and not yet written."""
        if self._waiting:
            copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            copy([to for to, _ in self._waiting], [g for _, g in self._waiting])
        self._waiting.clear()
        self._num_waiting = 0

    def gradients(self) -> list[Tensor]:
        """The gradient of each weight that has one."""
        self.settle()
        return [gradient for gradient in self._grads if gradient is not None]

    def by_weight(self) -> list[Tensor | None]:
        """The gradient of each weight, None where it has none."""
        self.settle()
        return list(self._grads)

    def gradient(self) -> Tensor | None:
        """All gradients, 0 where a weight has none; None without any."""
        if self._grad_N is None:
            return None
        self.settle()
        for place, gradient in zip(self._places, self._grads, strict=True):
            if gradient is None:
                self._grad_N[place].zero_()
        return self._grad_N

    def drop_gradient(self) -> None:
        """Free it."""
        self._grad_N = None
        self._grads = [None] * len(self._params)
        self._waiting.clear()
        self._num_waiting = 0

    def round_masters(self) -> None:
        """Bring the forward pass's copy up to date."""
        self.param_N.copy_(self.master_N)
