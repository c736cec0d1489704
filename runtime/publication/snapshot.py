"""The trainer's half of the disk transport: its weights as a folder of safetensors.

Runs in the process of each trainer rank. Weights stream through one bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.errors import ContractViolation
from runtime.publication.digests import Digests
from runtime.publication.limits import BUCKET_BYTES
from runtime.publication.protocol import ONLY_SHA256
from runtime.publication.safetensors_file import (
    INDEX,
    SafetensorsFile,
    index_json,
    plan_shards,
    spec_bytes,
)
from runtime.publication.told import Digest, WrittenSnapshot
from runtime.rundir.atomic import disk_full_as_error

SHARD_BYTES = 4 * 1024**3


class WeightExport(Protocol):
    """The part of ``TrainerBackend`` that is needed here."""

    def weight_specs(self) -> list[TensorSpec]:
        """HF names, dtypes and shapes in export order."""
        ...

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Full weights in buckets; collective."""
        ...


def write_snapshot(
    backend: WeightExport,
    folder: str,
    kinds: Iterable[WeightHash] = ONLY_SHA256,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> WrittenSnapshot:
    """Write rank 0's view of the weights into ``folder``, which exists and has no reader.

    Files of an older snapshot there are written over. Not durable: the folder is scratch. All ranks
    call ``export_weights`` together: the others ``join_export`` at the same time.

    Raises:
        DiskFull: if there is no room.
        ContractViolation: if the export differs from its own specs.
    """
    specs = backend.weight_specs()
    shards = plan_shards(specs, shard_bytes)
    to = Path(folder)
    _remove_others(to, {shard.file for shard in shards})
    with Digests(kinds, sum(spec_bytes(spec) for spec in specs), bucket_bytes) as sums:
        named = _flat(backend, bucket_bytes)
        try:
            for shard in shards:
                with SafetensorsFile(to / shard.file, shard.specs) as file:
                    for name, tensor in islice(named, len(shard.specs)):
                        host = tensor.detach().contiguous().cpu()
                        sums.add(name, tensor, host)
                        file.add(name, host)
                    file.finish(durable=False)
            if (more := next(named, None)) is not None:
                raise ContractViolation(f"the export gave {more[0]}, which its specs leave out")
        finally:
            for _ in named:  # the other ranks are in the collective until it is through
                pass
        digests = sums.result()
    if (index := index_json(shards)) is not None:
        with disk_full_as_error(to / INDEX):
            (to / INDEX).write_bytes(index)
    return WrittenSnapshot(num_tensors=len(specs), num_bytes=sums.num_bytes, digests=digests)


def digest_export(
    backend: WeightExport, kinds: Iterable[WeightHash], *, bucket_bytes: int = BUCKET_BYTES
) -> dict[WeightHash, Digest]:
    """Digests of rank 0's view of weights that stay where they are; others ``join_export``."""
    total_bytes = sum(spec_bytes(spec) for spec in backend.weight_specs())
    with Digests(kinds, total_bytes, bucket_bytes) as sums:
        for name, tensor in _flat(backend, bucket_bytes):
            sums.add(name, tensor)
        return sums.result()


def join_export(backend: WeightExport, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Take part in the export as a rank other than 0; its tensors mean nothing."""
    for _ in backend.export_weights(bucket_bytes):
        pass


def _flat(backend: WeightExport, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in backend.export_weights(bucket_bytes):
        yield from bucket


def _remove_others(folder: Path, keep: set[str]) -> None:
    """Delete what an older snapshot with other shards left behind."""
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        if path.name not in keep:
            path.unlink(missing_ok=True)
