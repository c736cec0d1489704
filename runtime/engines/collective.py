"""A collective group of its own, beside and without torch.distributed's default group.

The store keys are those of SGLang's helper (a PrefixStore of the group's name around the one that
torch makes for the group and device), so a trainer talks to both engines with the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]  # documented, not re-exported
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]  # the same
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # the same
)

from runtime.errors import UnavailableFeature

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class CollectiveGroup:
    """One side of a broadcast group. Blocking: call from a thread that may wait.

    Args:
        host: address of rank 0, which holds the store.
        port: its port.
        rank: ours; rank 0 sends.
        world_size: all ranks.
        name: the same on all sides.
        backend: ``gloo``, or ``nccl`` where there are GPUs; its tensors lie on one then.
        timeout_s: limit of joining and of each broadcast.

    Raises:
        UnavailableFeature: for another backend, or ``nccl`` without a GPU.
        RuntimeError: if not all ranks join within ``timeout_s``.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: str = "gloo",
        timeout_s: float,
    ) -> None:
        if backend not in _DEVICES or (backend == "nccl" and not torch.cuda.is_available()):
            raise UnavailableFeature(f"backend {backend!r} is not available here; gloo is")
        timeout = timedelta(seconds=timeout_s)
        # Kept: the group's connections are made through it, and it dies with its last reference.
        self._store: Any = TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True
        )
        inner = PrefixStore(
            f"{_DEVICES[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, self._store))
        )
        # Any: the stubs know none of its methods.
        self._group: Any = (
            ProcessGroupGloo(inner, rank, world_size, timeout)
            if backend == "gloo"
            else _nccl_group(inner, rank, world_size, timeout)
        )
        self._is_nccl = backend == "nccl"
        self._timeout = timeout
        self.rank = rank

    def broadcast(self, tensors: Sequence[Tensor], *, root: int = 0) -> None:
        """Send from ``root`` into everyone's tensors, in order.

        Raises:
            RuntimeError: if a peer is gone or the timeout passes.
        """
        group = self._group
        if group is None:
            raise RuntimeError("the broadcast group is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._is_nccl and tensors:
            torch.cuda.set_device(tensors[0].device)  # each thread has a current device of its own
        works = [group.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            work.wait(self._timeout)
        if self._is_nccl:
            # Waiting only orders the device's work; an error shows when the device gets there.
            torch.cuda.current_stream().synchronize()

    def receive(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Receive one broadcast tensor per (shape, dtype) from rank 0."""
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        self.broadcast(tensors)
        return tensors

    def close(self) -> None:
        """Leave: our connections close, so that peers waiting for us get an error. Idempotent.

        A thread of ours that waits for a broadcast keeps the connections open until its peer leaves
        too, or its timeout passes.
        """
        group, self._group, self._store = self._group, None, None
        if group is not None and self._is_nccl:
            group.abort()  # ends kernels that wait for a peer, which would wait for ever


def _nccl_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
