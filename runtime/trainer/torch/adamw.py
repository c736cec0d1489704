"""AdamW on a list of masters, or on long weights in one kernel. Same arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.trainer.settings import OptimizerSettings
from runtime.trainer.torch.long import LongWeights
from runtime.trainer.torch.weights import Weights


class AdamW(Protocol):
    """An optimizer's state of one rank, which exists from the start and so has one shape always.

    AdamW's, and what the others (``momentum``) do in its place.
    """

    @property
    def num_steps(self) -> int:
        """Steps taken, as bias correction counts them."""
        ...

    @num_steps.setter
    def num_steps(self, value: int) -> None: ...

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """One step with the gradients of the masters, clipped to ``max_norm``.

        ``norm`` is their length, float32 [1] where they are; not finite, it may not be given to an
        optimizer over a list.
        """
        ...

    def state(self) -> list[dict[str, Tensor]]:
        """What is kept of each master by kind, in its shape; to read or to write."""
        ...

    def squared_change(self) -> float | None:
        """Squared L2 norm of what the last step changed; None where that was not measured."""
        ...


class ListAdamW:
    """torch's own, over any masters."""

    def __init__(
        self, weights: Weights, settings: OptimizerSettings, *, only: Sequence[int] | None = None
    ) -> None:
        """Make the moments.

        Args:
            weights: of the rank.
            settings: of the optimizer.
            only: positions of the masters it is for; None: all.
        """
        self._weights = weights
        places = range(len(weights.masters)) if only is None else only
        self._masters = [weights.masters[at] for at in places]
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for at in places:
            groups.setdefault(settings.group_of(weights.names[at]), []).append(weights.masters[at])
        self._adam = torch.optim.AdamW(
            [
                {"params": masters, "weight_decay": decay, "lr_scale": scale}
                for (scale, decay), masters in groups.items()
            ],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        for master in self._masters:
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """See AdamW."""
        clip_gradients(self._weights, norm, max_norm)
        self.advance(lr)
        self._weights.masters_changed()

    def advance(self, lr: float) -> None:
        """The step alone, with gradients that are clipped; the forward pass does not know yet."""
        for group in self._adam.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self._adam.step()

    def state(self) -> list[dict[str, Tensor]]:
        """See AdamW; of its own masters."""
        states = [self._adam.state[master] for master in self._masters]
        return [{kind: s[kind] for kind in ("exp_avg", "exp_avg_sq")} for s in states]

    def squared_change(self) -> float | None:
        """See AdamW."""
        return None

    @property
    def num_steps(self) -> int:
        """See AdamW."""
        return int(self._adam.state[self._masters[0]]["step"].item())

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for master in self._masters:
            self._adam.state[master]["step"].fill_(float(value))


class LongAdamW:
    """Clip, step, rounding and the measure of the change in one pass over memory."""

    def __init__(
        self, long: LongWeights, settings: OptimizerSettings, *, names: Sequence[str]
    ) -> None:
        """Make the moments.

        Args:
            long: the weights.
            settings: of the optimizer.
            names: of the weights, in their order; neighbours of one group are one call.
        """
        self._long = long
        self._settings = settings
        self._parts = long.runs([settings.group_of(name) for name in names])
        self._exp_avg_N = torch.zeros_like(long.master_N)
        self._exp_avg_sq_N = torch.zeros_like(long.master_N)
        self._squared_change: Tensor | None = None
        self.num_steps = 0

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """See AdamW. Without any gradient, or with a norm that is not finite, nothing changes.

        Counted all the same: whoever learns the norm sets ``num_steps`` back.
        """
        grad_N = self._long.gradient()
        if grad_N is None:
            return
        self.num_steps += 1
        beta1, beta2 = self._settings.beta1, self._settings.beta2
        step = adamw_
        if grad_N.is_cuda:
            from runtime.trainer.torch import kernels

            step = kernels.adamw_
        long = self._long
        changes: list[Tensor] = []
        for part, (scale, weight_decay) in self._parts:
            rate = lr * scale
            change = step(
                long.param_N[part],
                long.master_N[part],
                self._exp_avg_N[part],
                self._exp_avg_sq_N[part],
                grad_N[part],
                norm,
                max_norm=max_norm,
                decay=1.0 - rate * weight_decay,
                step_size=rate / (1.0 - beta1**self.num_steps),
                root_correction=1.0 / math.sqrt(1.0 - beta2**self.num_steps),
                betas=(beta1, beta2),
                eps=self._settings.adam_eps,
            )
            changes.append(change)
        self._squared_change = changes[0] if len(changes) == 1 else torch.cat(changes)

    def state(self) -> list[dict[str, Tensor]]:
        """See AdamW."""
        named = self._long.named
        pairs = zip(named(self._exp_avg_N), named(self._exp_avg_sq_N), strict=True)
        return [{"exp_avg": first, "exp_avg_sq": second} for first, second in pairs]

    def squared_change(self) -> float | None:
        """See AdamW."""
        if self._squared_change is None:
            return 0.0
        return self._squared_change.double().sum().item()


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
    """What ``kernels.adamw_`` does, in plain torch: its CPU form.

    Source: Loshchilov and Hutter 2019.
    """
    if not norm.isfinite().all():
        return torch.zeros(1)
    grad_N = grad_N.float() * _clip_factor(norm, max_norm)
    exp_avg_N.lerp_(grad_N, 1.0 - betas[0])
    exp_avg_sq_N.mul_(betas[1]).addcmul_(grad_N, grad_N, value=1.0 - betas[1])
    old_N = master_N.clone()
    root_N = exp_avg_sq_N.sqrt().mul_(root_correction).add_(eps)
    master_N.mul_(decay).addcdiv_(exp_avg_N, root_N, value=-step_size)
    param_N.copy_(master_N)
    return old_N.sub_(master_N).square_()


def clip_gradients(weights: Weights, norm: Tensor, max_norm: float) -> None:
    """Give every master its gradient, scaled so that all together are no longer than ``max_norm``.

    Args:
        weights: of the rank.
        norm: length of the gradients, finite.
        max_norm: where they are cut.
    """
    weights.place_gradients()
    factor = _clip_factor(norm, max_norm).item()
    if factor != 1.0:
        for master in weights.masters:
            if master.grad is not None:
                master.grad.mul_(factor)


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return torch.where(norm > max_norm, max_norm / (norm + 1e-6), torch.ones_like(norm))
