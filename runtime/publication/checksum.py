"""The checksum by which a weight is recognised on both sides of a publication.

First 64 bits of the SHA-256 of the tensor's bytes, as 16 hex digits. SGLang's ``/weights_checker``
answers the same figure for float32 weights on a CPU, so no second algorithm is needed there.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

_INLINE_BYTES = 64 * 1024**2


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements as flat bytes, row-major.

    Copies only a tensor that is not contiguous or not in host memory.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().data


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Checksum of the elements' bytes; neither dtype nor shape is part of it."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:16]


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Checksum of each named tensor, in the order given; by threads when they are large."""
    tensors = list(named)
    total_bytes = sum(tensor.nbytes for _, tensor in tensors)
    with Checksums(total_bytes, total_bytes) as sums:
        for name, tensor in tensors:
            sums.add(name, tensor)
        return sums.result()


class Checksums:
    """Checksums of a stream of tensors, by threads beside the stream where that is worth it.

    At most ``ahead_bytes`` of tensors wait for their checksum, so that a stream stays a stream.

    Args:
        total_bytes: what is expected in all; below 64 MiB no thread is started.
        ahead_bytes: bound of what may wait.
    """

    def __init__(self, total_bytes: int, ahead_bytes: int) -> None:
        threads = min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads) if total_bytes >= _INLINE_BYTES else None
        self._ahead_bytes = ahead_bytes
        self._waiting: deque[tuple[str, int, Future[str]]] = deque()
        self._waiting_bytes = 0
        self._sums: dict[str, str] = {}
        self.num_bytes = 0
        """Bytes of all tensors so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; its elements must not change before ``result``."""
        size = tensor.nbytes
        self.num_bytes += size
        if self._pool is None:
            self._sums[name] = tensor_checksum(tensor)
            return
        self._waiting.append((name, size, self._pool.submit(tensor_checksum, tensor)))
        self._waiting_bytes += size
        while self._waiting_bytes > self._ahead_bytes and len(self._waiting) > 1:
            self._settle()

    def result(self) -> dict[str, str]:
        """All checksums, in the order of the tensors."""
        while self._waiting:
            self._settle()
        return self._sums

    def _settle(self) -> None:
        name, size, future = self._waiting.popleft()
        self._sums[name] = future.result()
        self._waiting_bytes -= size
