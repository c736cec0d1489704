"""What one row of a training pass gives, on its way to the host while the backward pass runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.trainer.objective import Objective

# Legend: N response tokens of the row.

SUMS = ("loss", "policy_loss", "kl_loss", "teacher_loss", "clipped", "active")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """Host tensors; not to be read before ``wait``."""

    counts: bool
    """False for the row of a rank without work, or of one whose neighbour speaks for it."""
    at: Tensor
    """int64 [N] flat places within the collection."""
    logprob_N: Tensor
    entropy_N: Tensor | None
    """None where it was not asked for."""
    sums: Tensor
    """float64 [6], in the order of ``SUMS``."""
    _arrived: torch.cuda.Event | None

    @classmethod
    def sent(
        cls,
        at: NDArray[np.int64],
        result: Objective,
        logprob_N: Tensor,
        entropy_N: Tensor | None,
        *,
        counts: bool,
    ) -> RowResult:
        """Order the copies; returns at once."""
        parts = (
            result.loss,
            result.policy_loss,
            result.kl_loss,
            result.teacher_loss,
            result.num_clipped,
            result.num_active,
        )
        sums = torch.stack([part.detach().double() for part in parts])
        logprob = _to_host(logprob_N)
        entropy = None if entropy_N is None else _to_host(entropy_N)
        sums = _to_host(sums)
        arrived = None
        if logprob_N.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return cls(
            counts=counts,
            at=torch.from_numpy(at),
            logprob_N=logprob,
            entropy_N=entropy,
            sums=sums,
            _arrived=arrived,
        )

    def wait(self) -> None:
        """Return when everything is there. Bounded by the row's own forward pass."""
        if self._arrived is not None:
            self._arrived.synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    # A non-blocking copy lands in pinned memory, so it does not hold up the host.
    return tensor.detach().to("cpu", non_blocking=True)
