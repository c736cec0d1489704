"""The checksum by which a weight is recognised on both sides of a publication.

First 64 bits of the SHA-256 of the tensor's bytes, as 16 hex digits. SGLang's ``/weights_checker``
answers the same figure for float32 weights on a CPU, so no second algorithm is needed there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's elements as flat bytes, row-major.

    Copies only a tensor that is not contiguous or not in host memory.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).cpu().numpy())


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Checksum of the elements' bytes; neither dtype nor shape is part of it."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:16]


def checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Checksum of each named tensor, in the order given."""
    return {name: tensor_checksum(tensor) for name, tensor in named}
