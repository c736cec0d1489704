"""An export in an object store: files first, its receipt last, so that a receipt proves a whole."""

from __future__ import annotations

from pathlib import Path

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.export import RECEIPT, read_receipt
from runtime.checkpoints.files import digest
from runtime.errors import StoreError


def upload_export(folder: Path, bucket: Bucket) -> int:
    """Upload a finished export below the bucket's prefix. Idempotent; returns how many files.

    A receipt that lies there already is taken down first: while files of another export are
    written over, nothing claims to be whole.

    Raises:
        StoreError: if there is no finished export, or the store refuses.
    """
    receipt = read_receipt(folder)
    if receipt is None:
        raise StoreError(f"{folder} holds no finished export", path=str(folder))
    bucket.delete([RECEIPT])
    for entry in receipt.files:
        bucket.send(entry.name, folder / entry.name, sha256=entry.sha256)
    bucket.send(RECEIPT, folder / RECEIPT, sha256=digest(folder / RECEIPT))
    return len(receipt.files) + 1
