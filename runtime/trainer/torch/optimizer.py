"""Steps over fp32 masters: schedule, global norm, clipping, and steps that are not taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm

from runtime.trainer.settings import OptimizerSettings
from runtime.trainer.torch.adamw import AdamW, ListAdamW, LongAdamW
from runtime.trainer.torch.momentum import ListMuon, ListSgd
from runtime.trainer.torch.ranks import Ranks
from runtime.trainer.torch.weights import Weights


def learning_rate(settings: OptimizerSettings, update: int) -> float:
    """Rate of the update ``update`` (1 is the first).

    Grows linearly over ``warmup_updates`` and reaches ``lr`` at the last of them; then constant, or
    down to ``min_lr`` at ``lr_decay_updates`` and flat from there: by half a cosine, linearly, or
    linearly in the last ``lr_decay_share`` of the way ("wsd": warm up, stay, decay).

    Source: Loshchilov and Hutter 2017 (cosine), Hu et al. 2024 (MiniCPM, WSD).
    """
    if update <= settings.warmup_updates:
        return settings.lr * update / settings.warmup_updates
    if settings.lr_schedule == "constant" or settings.lr_decay_updates is None:
        return settings.lr
    length = max(settings.lr_decay_updates - settings.warmup_updates, 1)
    done = min((update - settings.warmup_updates) / length, 1.0)
    if settings.lr_schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    elif settings.lr_schedule == "linear":
        left = 1.0 - done
    else:
        left = min((1.0 - done) / settings.lr_decay_share, 1.0)
    return settings.min_lr + (settings.lr - settings.min_lr) * left


class Optimizer:
    """When a step is taken, how long its gradient is, and at which rate."""

    def __init__(self, weights: Weights, settings: OptimizerSettings) -> None:
        self._weights = weights
        self._settings = settings
        self._adam = _made(weights, settings)

    def grad_norm(self) -> float:
        """Global L2 norm of the gradients, before clipping; equal on all ranks."""
        if self._weights.long is not None:
            whole = self._weights.long.gradient()
            return global_norm([] if whole is None else [whole], self._weights.ranks)
        return global_norm(self._weights.collect_gradients(), self._weights.ranks)

    def step(self, update: int, norm: float) -> bool:
        """Clip by ``norm`` and step with the rate of ``update``; False if the step was skipped.

        A norm that is not finite skips it: weights and moments stay as they were. Gradients are
        dropped either way.
        """
        is_taken = math.isfinite(norm)
        if is_taken:
            length = torch.tensor([norm], dtype=torch.float32, device=self._weights.ranks.device)
            self._adam.step(*self._how(update, length))
        self._weights.drop_gradients()
        return is_taken

    @property
    def steps_unseen(self) -> bool:
        """A step can be ordered before the host knows how long the gradient is."""
        return isinstance(self._adam, LongAdamW)

    def step_unseen(self, update: int) -> float:
        """``grad_norm`` and ``step`` in one; the norm. Only where ``steps_unseen``.

        The host learns the norm while the step is under way: between the two a GPU would stand idle
        for as long as it takes to tell the host and be told.
        """
        long, adam = self._weights.long, self._adam
        gradient = None if long is None else long.gradient()
        if gradient is None:
            self._weights.drop_gradients()
            return 0.0
        norm = vector_norm(gradient, dtype=torch.float32).reshape(1)
        told, arrived = norm, None
        if norm.is_cuda:
            told = norm.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        adam.step(*self._how(update, norm))
        self._weights.drop_gradients()
        if arrived is not None:
            arrived.synchronize()
        found = told.item()
        if not math.isfinite(found):
            adam.num_steps -= 1
        return found

    def _how(self, update: int, norm: Tensor) -> tuple[float, Tensor, float]:
        return learning_rate(self._settings, update), norm, self._settings.max_grad_norm

    def state(self) -> list[dict[str, Tensor]]:
        """This rank's part of what is kept of each master, by kind; to read or to write."""
        return self._adam.state()

    @property
    def measures_change(self) -> bool:
        """A step measures how far it moves the masters, so nobody need keep the old ones."""
        return isinstance(self._adam, LongAdamW)

    def change_norm(self) -> float:
        """L2 norm of what the last step taken changed; only where ``measures_change``."""
        return math.sqrt(self._adam.squared_change() or 0.0)

    @property
    def num_steps(self) -> int:
        """Steps taken, as bias correction counts them."""
        return self._adam.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._adam.num_steps = value


def _made(weights: Weights, settings: OptimizerSettings) -> AdamW:
    if settings.kind == "sgd":
        return ListSgd(weights, settings)
    if settings.kind == "muon":
        return ListMuon(weights, settings)
    if weights.long is None:
        return ListAdamW(weights, settings)
    return LongAdamW(weights.long, settings, names=weights.names)


def global_norm(parts: Sequence[Tensor], ranks: Ranks) -> float:
    """L2 norm of tensors of which every rank holds its part (alone: all); 0.0 without any."""
    square = torch.zeros((), dtype=torch.float64)
    if parts:
        in_fp32 = all(part.dtype == torch.float32 for part in parts)
        norms = list(parts) if in_fp32 else [vector_norm(p, dtype=torch.float32) for p in parts]
        square += get_total_norm(norms).double().square().cpu()
    return math.sqrt(ranks.add_up_on_cpu(square).item())
