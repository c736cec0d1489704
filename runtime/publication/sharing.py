"""The trainer's half of the ipc transport: its weights in memory that others can open.

Runs in the process of each trainer rank; rank 0 packs, the others take part in the export. Buckets
stay where they are and are written over by the next snapshot of their place: an engine that opened
one pays for that once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.engines.protocol import WeightHash
from runtime.engines.shared import CudaHandle, SharedBucket, SharedTensor, lay_out
from runtime.errors import ContractViolation
from runtime.publication.digests import Digests
from runtime.publication.limits import BUCKET_BYTES
from runtime.publication.protocol import ONLY_SHA256
from runtime.publication.safetensors_file import spec_bytes, spec_of
from runtime.publication.snapshot import WeightExport, join_export
from runtime.publication.told import SharedWeights
from runtime.rundir.atomic import disk_full_as_error


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Flat memory of one bucket, and how others open it."""

    memory: torch.Tensor
    path: str | None
    cuda: CudaHandle | None


class WeightSharing:
    """Keeps the buckets of each place.

    Args:
        backend: this rank's trainer.
        rank: of the trainer; 0 packs.
        bucket_bytes: size of a bucket at most; a larger tensor goes alone.
    """

    def __init__(
        self, backend: WeightExport, *, rank: int = 0, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._buffers: dict[tuple[int, int], _Buffer] = {}

    def share(
        self, place: int, folder: str, kinds: Iterable[WeightHash] = ONLY_SHA256
    ) -> SharedWeights | None:
        """Pack the current weights into the buckets of ``place``; None on ranks other than 0.

        Raises:
            DiskFull: if host memory has no room.
            ContractViolation: if the export is empty or differs from its own specs.
        """
        if self._rank != 0:
            join_export(self._backend, bucket_bytes=self._bucket_bytes)
            return None
        total = sum(spec_bytes(spec) for spec in self._backend.weight_specs())
        shared: list[SharedBucket] = []
        device = torch.device("cpu")
        with Digests(kinds, total, self._bucket_bytes) as digests:
            for index, bucket in enumerate(self._backend.export_weights(self._bucket_bytes)):
                device = bucket[0][1].device
                shared.append(self._pack(place, index, bucket, Path(folder), digests))
            found = digests.result()
        if digests.num_bytes != total or not shared:
            raise ContractViolation(f"the export gave {digests.num_bytes} bytes of {total}")
        if device.type == "cuda":
            # Readers are told as soon as this returns; they see what the device has written.
            torch.cuda.synchronize(device)
        return SharedWeights(
            num_tensors=sum(len(bucket.tensors) for bucket in shared),
            num_bytes=total,
            digests=found,
            buckets=tuple(shared),
        )

    def _pack(
        self,
        place: int,
        index: int,
        bucket: list[tuple[str, torch.Tensor]],
        folder: Path,
        digests: Digests,
    ) -> SharedBucket:
        tensors, num_bytes = lay_out([spec_of(name, tensor) for name, tensor in bucket])
        device = bucket[0][1].device
        buffer = self._buffer(place, index, num_bytes, device, folder)
        views = [_view(buffer.memory, place) for place in tensors]
        with torch.no_grad():
            # One launch for the bucket; torch has no public name for it.
            copy_all: Any = getattr(torch, "_foreach_copy_")  # noqa: B009
            copy_all(views, [t.detach() for _, t in bucket])
        for (name, _), view in zip(bucket, views, strict=True):
            digests.add(name, view)
        return SharedBucket(
            num_bytes=num_bytes, tensors=tensors, path=buffer.path, cuda=buffer.cuda
        )

    def _buffer(
        self, place: int, index: int, num_bytes: int, device: torch.device, folder: Path
    ) -> _Buffer:
        found = self._buffers.get((place, index))
        if found is None or found.memory.numel() != num_bytes or found.memory.device != device:
            made = _on_gpu(num_bytes, device) if device.type == "cuda" else None
            found = made or _in_file(folder / f"bucket-{index}", num_bytes)
            self._buffers[place, index] = found
        return found


def _view(memory: torch.Tensor, tensor: SharedTensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.spec.dtype)
    return memory[tensor.start : tensor.end].view(dtype).view(tensor.spec.shape)


def _in_file(path: Path, num_bytes: int) -> _Buffer:
    with disk_full_as_error(path), path.open("wb") as file:
        # Pages that are asked for here cannot be missing when they are written through the map.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return _Buffer(memory, str(path), None)


def _on_gpu(num_bytes: int, device: torch.device) -> _Buffer:
    from torch.multiprocessing.reductions import reduce_tensor

    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    reduced: tuple[Any, tuple[Any, ...]] = reduce_tensor(memory)
    fields = reduced[1]
    # (class, size, stride, offset, storage class, dtype, device, handle, storage bytes and offset,
    # requires_grad, reference counter and its offset, event, whether to wait for it)
    handle = CudaHandle(
        device=str(torch.cuda.get_device_properties(device).uuid),
        handle=bytes(fields[7]),
        storage_bytes=int(fields[8]),
        storage_offset=int(fields[9]),
        ref_counter=bytes(fields[11]),
        ref_counter_offset=int(fields[12]),
        event=bytes(fields[13]),
        needs_event=bool(fields[14]),
    )
    return _Buffer(memory, None, handle)
