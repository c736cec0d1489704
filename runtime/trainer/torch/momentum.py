"""SGD and Muon by torch's own implementations, on the masters of one rank or of several.

SGD works element by element, so a rank's rows are enough. Muon works on whole matrices: where they
are sharded, gradient and momentum are gathered for one matrix at a time, every rank makes the same
step, and keeps its rows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.trainer.settings import OptimizerSettings
from runtime.trainer.torch.adamw import ListAdamW, clip_gradients
from runtime.trainer.torch.weights import Weights


class ListSgd:
    """Momentum of the clipped gradients; weight decay is apart from them, as with the others."""

    def __init__(self, weights: Weights, settings: OptimizerSettings) -> None:
        self._weights = weights
        self._has_momentum = settings.momentum > 0
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, master in zip(weights.names, weights.masters, strict=True):
            groups.setdefault(settings.group_of(name), []).append(master)
        self._sgd = torch.optim.SGD(
            [
                {"params": masters, "lr_scale": scale, "decay": decay}
                for (scale, decay), masters in groups.items()
            ],
            lr=settings.lr,
            momentum=settings.momentum,
        )
        if self._has_momentum:
            for master in weights.masters:
                self._sgd.state[master] = {"momentum_buffer": torch.zeros_like(master)}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """See AdamW."""
        clip_gradients(self._weights, norm, max_norm)
        for group in self._sgd.param_groups:
            group["lr"] = rate = lr * group["lr_scale"]
            for master in group["params"]:
                if master.grad is not None:
                    master.mul_(1.0 - rate * group["decay"])
        self._sgd.step()
        self.num_steps += 1
        self._weights.masters_changed()

    def state(self) -> list[dict[str, Tensor]]:
        """See AdamW."""
        if not self._has_momentum:
            return [{} for _ in self._weights.masters]
        buffers = (self._sgd.state[master]["momentum_buffer"] for master in self._weights.masters)
        return [{"momentum": buffer} for buffer in buffers]

    def squared_change(self) -> float | None:
        """See AdamW."""
        return None


class ListMuon:
    """Muon for the matrices of layers and adapters; AdamW for embeddings, the head and vectors.

    Steps of matrices are scaled to the size that AdamW's have, so one learning rate is right for
    both.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (the scale).
    """

    def __init__(self, weights: Weights, settings: OptimizerSettings) -> None:
        self._weights = weights
        self._settings = settings
        tables = weights.tables()
        self._matrices = [
            at for at, p in enumerate(weights.params) if p.dim() == 2 and id(p) not in tables
        ]
        rest = sorted(set(range(len(weights.params))) - set(self._matrices))
        self._rest = rest
        self._adam = ListAdamW(weights, settings, only=rest) if rest else None
        self._momentum = {at: torch.zeros_like(weights.masters[at]) for at in self._matrices}
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """See AdamW."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        if self._adam is not None:
            self._adam.num_steps = value

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """See AdamW."""
        clip_gradients(self._weights, norm, max_norm)
        if self._adam is not None:
            self._adam.advance(lr)
        slices = self._weights.row_slices()
        for at in self._matrices:
            if self._weights.masters[at].grad is not None:
                scale, decay = self._settings.group_of(self._weights.names[at])
                self._step_one(at, slices[at][1], lr * scale, decay)
        self._num_steps += 1
        self._weights.masters_changed()

    def _step_one(self, at: int, start: int, rate: float, decay: float) -> None:
        """One matrix: the step of the whole, taken on this rank's rows."""
        master, momentum = self._weights.masters[at], self._momentum[at]
        assert master.grad is not None
        param = self._weights.params[at]
        whole_momentum = _whole(momentum, param)
        step = nn.Parameter(torch.zeros_like(whole_momentum))
        step.grad = _whole(master.grad, param)
        with torch.enable_grad():
            muon = torch.optim.Muon(
                [step],
                lr=rate,
                weight_decay=0.0,
                momentum=self._settings.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        muon.state[step]["momentum_buffer"] = whole_momentum
        muon.step()
        rows = slice(start, start + master.shape[0])
        master.mul_(1.0 - rate * decay).add_(step[rows])
        momentum.copy_(whole_momentum[rows])

    def state(self) -> list[dict[str, Tensor]]:
        """See AdamW."""
        found: list[dict[str, Tensor]] = [{} for _ in self._weights.masters]
        for at, buffer in self._momentum.items():
            found[at] = {"momentum": buffer}
        if self._adam is not None:
            for at, moments in zip(self._rest, self._adam.state(), strict=True):
                found[at] = moments
        return found

    def squared_change(self) -> float | None:
        """See AdamW."""
        return None


def _whole(part: Tensor, param: Tensor) -> Tensor:
    """All rows of what this rank has some of, sharded as ``param`` is; collective where it is."""
    if not isinstance(param, DTensor):
        return part.clone()
    placed = DTensor.from_local(
        part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
    return placed.full_tensor()
