"""Reading safetensors back without torch: which tensors, of which dtype, with which bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoints.files import worker_threads
from runtime.errors import PartialWrite
from runtime.safetensors_header import HeaderRefused, tensors_of_file

_CHUNK = 8 << 20
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as it lies in a file."""

    file: Path
    name: str
    dtype: str
    """torch's name of a floating dtype, else the format's own."""
    start: int
    """Of its bytes in the file."""
    size: int

    def checksum(self) -> str:
        """As ``runtime.publication.checksum`` makes it from the tensor."""
        sha = hashlib.sha256()
        left = self.size
        with self.file.open("rb") as file:
            file.seek(self.start)
            while left and (data := file.read(min(left, _CHUNK))):
                sha.update(data)
                left -= len(data)
        return sha.hexdigest()[:16]


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of a folder's safetensors files, by file and place.

    Raises:
        PartialWrite: if a header is damaged, a file is shorter than its header says, or two files
            hold one name.
    """
    tensors = [t for path in sorted(folder.glob("*.safetensors")) for t in _read_header(path)]
    if len({t.name for t in tensors}) != len(tensors):
        raise PartialWrite(f"{folder} holds one tensor in two files", path=str(folder))
    return tensors


def checksums_of(tensors: list[StoredTensor]) -> dict[str, str]:
    """Checksum of each tensor's bytes, read from the files."""
    with ThreadPoolExecutor(worker_threads(len(tensors))) as pool:
        sums = pool.map(StoredTensor.checksum, tensors)
        return {tensor.name: checksum for tensor, checksum in zip(tensors, sums, strict=True)}


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        for tensor in tensors_of_file(path):
            yield StoredTensor(
                file=path,
                name=tensor.name,
                dtype=_NAMES.get(tensor.dtype, tensor.dtype),
                start=tensor.start,
                size=tensor.end - tensor.start,
            )
    except HeaderRefused as exc:
        raise PartialWrite(f"{path.name}: {exc}", path=str(path)) from exc
