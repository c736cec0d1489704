"""The copy of the chain in an object store: what the store knows of a run's history.

Records are created in their order, each only where none stands, and none ever changes. So the copy
is a beginning of the chain on the disk, and of two owners on two disks one is stopped.
"""

from __future__ import annotations

import re

from runtime.checkpoints.bucket import Bucket
from runtime.errors import ManifestConflict
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import ChainUnreadable, Record, decode

_FOLDER = "chain/"
_RECORD = re.compile(r"chain/(0|[1-9]\d*)\.json")


class ChainCopy:
    """What stands in the store of the chain of one output root, and how more gets there."""

    def __init__(self, root: RunRoot, bucket: Bucket) -> None:
        """Look at what is there.

        Args:
            root: the output root.
            bucket: where the copy is.

        Raises:
            StoreUnreachable: if the store does not answer.
            ManifestConflict: if another history stands there.
        """
        self._root = root
        self._bucket = bucket
        self._there = set(_numbers(bucket))
        self.num_records = max(self._there, default=-1) + 1
        """Records the store knew of just now, from the first."""
        # Two histories that part nowhere have the same newest record.
        if self._there:
            self._check(f"{_FOLDER}{max(self._there)}.json")

    def extend(self, last: Record) -> None:
        """Make the store know the chain up to a record of it. Idempotent; in order.

        Raises:
            StoreUnreachable: if the store did not take all; asked again, it goes on from there.
            ManifestConflict: if a second owner was faster.
        """
        for record in Chain(self._root).read()[: last.seq + 1]:
            if record.seq in self._there:
                continue
            name = f"{_FOLDER}{record.seq}.json"
            data = atomic.read_bytes(self._root.path / name)
            assert data is not None  # it was read just now, and records never go
            if not self._bucket.create(name, data):
                self._check(name)
            self._there.add(record.seq)

    def _check(self, name: str) -> None:
        if self._bucket.read(name) != atomic.read_bytes(self._root.path / name):
            raise ManifestConflict(
                f"{self._bucket}/{name} is of another history than ours: a second owner of this "
                "run has copied there, or checkpoint.upload belongs to another run",
                record=name,
            )


def read_copy(bucket: Bucket) -> list[tuple[Record, bytes]]:
    """The chain as the store has it, each record with its bytes.

    Raises:
        StoreUnreachable: if the store does not answer.
        ChainUnreadable: if it has a hole or cannot be read.
    """
    numbers = sorted(_numbers(bucket))
    chain: list[tuple[Record, bytes]] = []
    for seq in range(len(numbers)):
        name = f"{_FOLDER}{seq}.json"
        data = bucket.read(name)
        if data is None:
            raise ChainUnreadable(
                f"{bucket}/{name} is missing, {numbers[-1]} is there", record=name
            )
        chain.append((decode(data, name=f"{bucket}/{name}"), data))
    return chain


def _numbers(bucket: Bucket) -> list[int]:
    return [int(m[1]) for name in bucket.names(_FOLDER) if (m := _RECORD.fullmatch(name))]
