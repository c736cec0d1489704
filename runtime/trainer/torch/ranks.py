"""The ranks of one trainer: rendezvous, who shares rows with whom, and sums over all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # documented here, not re-exported
)

from runtime.errors import ConfigError
from runtime.trainer.torch.context import ContextGroup, divisors


class Ranks:
    """This process among ``size``; alone, every collective is the identity and no group exists."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self.context: ContextGroup | None = None
        """The ranks that share rows with this one; None where each rank has rows of its own."""
        self._store: TCPStore | None = None
        self._limit = timedelta(0)
        # Under Ray a rank sees its own GPU alone; ranks that see all of them take one each.
        gpus = torch.cuda.device_count()
        self._device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")

    def listen(self, host: str, *, timeout_s: float) -> int:
        """Open the rendezvous store on a free port of ``host`` (rank 0); returns the port."""
        store = TCPStore(
            host,
            0,
            world_size=self.size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        self._store = store
        return store.port

    def join(self, host: str, port: int, *, backend: str, timeout_s: float) -> None:
        """Enter the process group; returns when all ranks are in.

        Args:
            host: where rank 0 listens.
            port: as ``listen`` returned it.
            backend: "gloo" or "nccl".
            timeout_s: limit of the rendezvous and of every later collective.
        """
        if self.size == 1:
            return
        self._limit = limit = timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = TCPStore(host, port, world_size=self.size, is_master=False, timeout=limit)
        self.enter_device()
        dist.init_process_group(
            backend,
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
            # Said here, so that nothing has to guess it from the rank.
            device_id=self._device if backend == "nccl" else None,
        )

    def share_rows(self, context: int) -> None:
        """Make groups of ``context`` neighbours that share each row; collective, idempotent.

        Neighbours, since they exchange keys and values in every layer and are likeliest to be on
        one machine. Comes after ``join``.

        Raises:
            ConfigError: if the ranks do not divide into such groups.
            RuntimeError: before ``join``.
        """
        if self.size % context:
            raise ConfigError(
                f"core.context = {context}: the {self.size} trainer rank(s) do not divide into "
                f"groups of so many: set core.context to one of {divisors(self.size)}, or give the "
                f"trainer a multiple of {context} ranks",
                context=context,
                ranks=self.size,
            )
        if context == self.context_size:
            return
        self.context = None
        if context == 1:
            return
        if not dist.is_initialized():
            raise RuntimeError("ranks that share rows need a process group: call join first")
        for first in range(0, self.size, context):
            # Every rank takes part in making every group.
            made: Any = dist.new_group(list(range(first, first + context)), timeout=self._limit)
            if first <= self.rank < first + context:
                place = self.rank - first
                self.context = ContextGroup(rank=place, size=context, name=made.group_name)

    @property
    def context_size(self) -> int:
        """Ranks that share a row."""
        return 1 if self.context is None else self.context.size

    @property
    def replicas(self) -> int:
        """Ranks, or groups of them, that have rows of their own."""
        return self.size // self.context_size

    @property
    def replica(self) -> int:
        """Which of those this rank belongs to."""
        return self.rank // self.context_size

    @property
    def speaks(self) -> bool:
        """This rank's figures of a row count; those of the others that share it are the same."""
        return self.context is None or self.context.rank == 0

    def enter_device(self) -> None:
        """Make this rank's GPU the current one of the calling thread; nothing on a CPU."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def add_up(self, value: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def add_up_on_cpu(self, value: Tensor) -> Tensor:
        """Sum over ranks of a CPU tensor, back on the CPU."""
        if self.size == 1:
            return value
        return self.add_up(value.to(self.device)).cpu()

    def leave(self) -> None:
        """Destroy the group, and with it those that share rows. Idempotent."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self.context = None
        self._store = None

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device
