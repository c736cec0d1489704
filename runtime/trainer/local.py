"""A trainer of one rank in this very process, for benchmarks and tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.publication.protocol import ONLY_SHA256
from runtime.trainer.protocol import Sequence, StagedState, TrainBatch, TrainMetrics
from runtime.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from runtime.publication.told import SharedWeights, WrittenSnapshot


class LocalGroup:
    """Implements TrainerHandle with a thread in place of processes.

    Keeps what callers rely on: calls one at a time, writing beside them, the same errors. Cannot
    lose a rank. Waits have no deadline of their own: nothing here waits for another process.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        from runtime.trainer.rank import RankServer

        self._server = RankServer(settings, rank=0, size=1, epoch=0)
        self._serials = itertools.count(1)
        self._stopped = anyio.Event()

    async def _step(self, method: str, *args: Any, **kwargs: Any) -> Any:
        from runtime.trainer.operations import Operation

        operation = Operation(
            epoch=0,
            update=self._server.backend.update,
            name=method,
            serial=next(self._serials),
        )
        return await anyio.to_thread.run_sync(
            partial(self._server.step, operation, method, *args, **kwargs)
        )

    async def load(self, model_path: str) -> dict[str, object]:
        """See TrainerHandle."""
        return await self._step("load", model_path)

    async def score(
        self, sequences: tuple[Sequence, ...], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """See TrainerHandle."""
        return await self._step("score", sequences, temperature=temperature)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See TrainerHandle."""
        return await self._step("train_step", batch)

    async def weight_specs(self) -> list[TensorSpec]:
        """See TrainerHandle."""
        return await self._step("weight_specs")

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """See TrainerHandle."""
        return await self._step("write_snapshot", folder, kinds)

    async def share_weights(
        self, place: int, folder: str, kinds: frozenset[WeightHash]
    ) -> SharedWeights:
        """Pack the current weights for engines of this machine (``publication.ipc``)."""
        return await self._step("share_weights", place, folder, kinds)

    async def write_adapter(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """See TrainerHandle."""
        return await self._step("write_adapter", folder, kinds)

    async def digest_base(
        self, kinds: frozenset[WeightHash]
    ) -> Mapping[WeightHash, Mapping[str, str]]:
        """See TrainerHandle."""
        return await self._step("digest_base", kinds)

    async def stage(self) -> Items[StagedState]:
        """See TrainerHandle."""
        return [await self._step("stage")]

    async def write_staged(self, staged: Items[StagedState], folder: str) -> Mapping[str, str]:
        """See TrainerHandle."""
        (only,) = staged
        return await anyio.to_thread.run_sync(self._server.backend.write_staged, only.token, folder)

    async def restore(self, folder: str) -> dict[str, object]:
        """See TrainerHandle."""
        return await self._step("restore", folder)

    async def watch(self) -> None:
        """See TrainerHandle."""
        await self._stopped.wait()

    async def shutdown(self) -> None:
        """See TrainerHandle."""
        await anyio.to_thread.run_sync(self._server.stop)
        self._stopped.set()

    @property
    def backend(self) -> Any:
        """The one rank's backend (``TorchTrainer``), to look at its weights."""
        return self._server.backend
