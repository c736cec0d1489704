"""What engines must answer about weights that are streaming by: one walk, every hash asked for."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from runtime.engines.protocol import WeightHash
from runtime.publication.checksum import Checksums
from runtime.publication.mix64 import Tiles
from runtime.publication.told import Digest


class Digests:
    """Digests of one export.

    Args:
        hashes: at least one.
        total_bytes: of the export.
        ahead_bytes: how much may wait for its checksum.
    """

    def __init__(self, hashes: Iterable[WeightHash], total_bytes: int, ahead_bytes: int) -> None:
        wanted = frozenset(hashes)
        self._sums = Checksums(total_bytes, ahead_bytes) if "sha256" in wanted else None
        self._tiles = Tiles(ahead_bytes) if "mix64" in wanted else None
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
        if self._sums is not None:
            self._sums.__exit__(kind, error, trace)

    def add(self, name: str, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """Take one tensor; its elements must not change before ``result``.

        Args:
            name: HF name.
            tensor: where the export left it.
            host: the same in host memory, where there is such a copy already.
        """
        self.num_bytes += tensor.nbytes
        if self._tiles is not None:
            self._tiles.add(name, tensor)
        if self._sums is not None:
            self._sums.add(name, tensor.detach().contiguous().cpu() if host is None else host)

    def result(self) -> dict[WeightHash, Digest]:
        """All digests by hash and HF name."""
        found: dict[WeightHash, Digest] = {}
        if self._sums is not None:
            found["sha256"] = self._sums.result()
        if self._tiles is not None:
            found["mix64"] = self._tiles.result()
        return found
