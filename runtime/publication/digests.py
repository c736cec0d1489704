"""What an engine must say about weights that are streaming by, for each kind of engine."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from runtime.engines.protocol import WeightDigest
from runtime.publication.checksum import Checksums
from runtime.publication.fused import Fusing
from runtime.publication.mix64 import digest, tiles

Digest = dict[str, str]


class Digests:
    """Digests of one export, of every kind that some engine of this publication speaks.

    Args:
        kinds: at least one.
        total_bytes: of the export.
        ahead_bytes: how much may wait for its checksum.
    """

    def __init__(self, kinds: Iterable[WeightDigest], total_bytes: int, ahead_bytes: int) -> None:
        self._streams = {kind: _Stream(kind, total_bytes, ahead_bytes) for kind in kinds}
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
        for stream in self._streams.values():
            stream.sums.__exit__(kind, error, trace)

    def add(self, name: str, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """Take one tensor; its elements must not change before ``result``.

        Args:
            name: HF name.
            tensor: where the export left it.
            host: the same in host memory, where there is such a copy already.
        """
        self.num_bytes += tensor.nbytes
        for kind, stream in self._streams.items():
            if kind.hash == "sha256" and tensor.is_cuda:
                host = tensor.detach().contiguous().cpu() if host is None else host
                stream.add(name, host)
            else:
                stream.add(name, tensor)

    def result(self) -> dict[WeightDigest, Digest]:
        """All digests by kind and name.

        Raises:
            ContractViolation: if the export was not whole.
        """
        return {kind: stream.result() for kind, stream in self._streams.items()}


class _Stream:
    def __init__(self, kind: WeightDigest, total_bytes: int, ahead_bytes: int) -> None:
        self._fusing = Fusing(kind.tensor) if kind.names == "fused" else None
        self._mixes = kind.hash == "mix64"
        self._tiles: list[tuple[str, torch.Tensor]] = []
        self.sums = Checksums(0 if self._mixes else total_bytes, ahead_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        named = [(name, tensor)] if self._fusing is None else self._fusing.push(name, tensor)
        for held_name, held in named:
            if self._mixes:
                self._tiles.append((held_name, tiles(held)))
            else:
                self.sums.add(held_name, held)

    def result(self) -> Digest:
        if self._fusing is not None:
            self._fusing.finish()
        if not self._mixes:
            return self.sums.result()
        if not self._tiles:
            return {}
        # One copy for all: each would wait for the device.
        totals = torch.stack([part.sum() for _, part in self._tiles]).tolist()
        return {name: digest(t) for (name, _), t in zip(self._tiles, totals, strict=True)}
