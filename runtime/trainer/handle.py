"""The trainer as the session calls it: coroutines, whatever processes lie behind them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.publication.protocol import ONLY_SHA256
from runtime.trainer.protocol import Sequence, StagedState, TrainBatch, TrainMetrics

if TYPE_CHECKING:
    from runtime.publication.told import WrittenSnapshot


class TrainerHandle(Protocol):
    """All ranks of one trainer.

    Calls that need the weights to stand still wait for one another; ``write_staged`` runs beside
    them. Errors: ContractViolation and StoreError as the backend raises them; TrainerLost when a
    rank is gone, after which nothing but ``shutdown`` may be called.
    """

    async def load(self, model_path: str) -> dict[str, object]:
        """Load HF weights and a fresh optimizer; facts about the model."""
        ...

    async def score(
        self, sequences: tuple[Sequence, ...], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """Log-probs of each response under the current weights; same order."""
        ...

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """Make one update."""
        ...

    async def weight_specs(self) -> list[TensorSpec]:
        """HF names, dtypes and shapes in export order."""
        ...

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """Write the current weights as safetensors into ``folder``."""
        ...

    async def write_adapter(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """Write the adapters alone into ``folder``, in peft's format.

        Raises:
            ConfigError: if the trainer has none.
        """
        ...

    async def digest_base(
        self, kinds: frozenset[WeightHash]
    ) -> Mapping[WeightHash, Mapping[str, str]]:
        """Digests, by hash and HF name, of the weights under the adapters, which never change."""
        ...

    async def stage(self) -> Items[StagedState]:
        """Begin to copy the state of all ranks to host memory; one entry per rank, by rank."""
        ...

    async def write_staged(self, staged: Items[StagedState], folder: str) -> Mapping[str, str]:
        """Write the copies into ``folder``, fsynced; SHA-256 of all files by name."""
        ...

    async def restore(self, folder: str) -> dict[str, object]:
        """Load a committed state; ``update`` and ``consumed_digest``."""
        ...

    async def watch(self) -> None:
        """Run until ``shutdown``; raises TrainerLost as soon as a rank dies, also between calls."""
        ...

    async def shutdown(self) -> None:
        """End all ranks. Idempotent."""
        ...
