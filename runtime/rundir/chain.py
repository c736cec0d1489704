"""The chain: history and fence in one.

A record is appended by linking a whole, synced file to the next free number. Whoever finds the
number taken has been superseded. Taking over *is* appending an epoch record, so there is no check
before a write anywhere on the way to history.
"""

from __future__ import annotations

import re
from typing import TypeVar

from runtime.errors import ContractViolation, FencedError, StoreError
from runtime.rundir import atomic
from runtime.rundir.history import newest_epoch
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import (
    ChainUnreadable,
    CommitRecord,
    EpochRecord,
    Record,
    decode,
    encode,
)

_NAME = re.compile(r"(0|[1-9]\d*)\.json")
_R = TypeVar("_R", bound=Record)


class Chain:
    """One process's view of the chain: what it has seen, and what it may append.

    Records are immutable, so each is read once. Not thread-safe: one writer thread per instance.
    """

    def __init__(self, root: RunRoot) -> None:
        self._folder = root.chain
        self._records: list[Record] = []
        self._superseded: str | None = None

    @property
    def seen(self) -> tuple[Record, ...]:
        """What was read or appended so far, in order; no file is touched."""
        return tuple(self._records)

    def read(self) -> tuple[Record, ...]:
        """All records in order; reads only what is new since the last call.

        Raises:
            ChainUnreadable: if a record is damaged, missing between others, or of a newer version.
        """
        listed = self._highest_listed()
        while True:
            seq = len(self._records)
            name = self._folder / f"{seq}.json"
            data = atomic.read_bytes(name)
            if data is None:
                # A listing may lag behind; a record that is listed and cannot be read is missing.
                if seq <= listed:
                    raise ChainUnreadable(
                        f"{name} is missing but record {listed} exists: restore it from a copy",
                        record=str(name),
                    )
                return self.seen
            record = decode(data, name=str(name))
            if record.seq != seq:
                raise ChainUnreadable(
                    f"{name} says it is record {record.seq}: files were renamed by hand",
                    record=str(name),
                )
            self._records.append(record)

    def append(self, record: _R) -> _R:
        """Append as the record after the last one seen, durably.

        Args:
            record: an epoch record one above the newest epoch seen, or another record of it.

        Returns:
            The record with its place in the chain.

        Raises:
            FencedError: if a newer owner exists; nothing was written, and never will be.
            DiskFull: if there was no space; nothing was written, and it may be tried again.
            StoreError: if the file system failed otherwise; ``seen`` tells if the record is in.
            ContractViolation: if a new epoch is not the next one.
        """
        if self._superseded is not None:
            raise FencedError(self._superseded, record=record.kind, epoch=record.epoch)
        self._check_epoch(record)
        placed = record.model_copy(update={"seq": len(self._records)})
        name = self._folder / f"{placed.seq}.json"
        data = encode(placed)
        try:
            atomic.write_new(name, data)
        except FileExistsError as error:
            raise self._fenced(record, f"chain/{name.name} exists already") from error
        except OSError as error:
            # A folder whose fsync failed may hold the record all the same: see it, or we would
            # later take our own record for a newer owner's.
            if atomic.read_bytes(name) == data:
                self._records.append(placed)
            raise StoreError(f"cannot append {name}: {error}", record=str(name)) from error
        self._records.append(placed)
        return placed

    def retake(self, restored: CommitRecord, *, reason: str, time: float) -> EpochRecord:
        """Begin another epoch of the same owner, restoring an older commit than its epoch named.

        The session does so when the commit its guard chose turns out to be damaged: only an epoch
        record takes later commits out of history.

        Args:
            restored: the commit that is restored instead.
            reason: what is wrong with the newer ones.
            time: seconds since the Unix epoch.

        Raises:
            FencedError: if a newer owner exists.
        """
        own = newest_epoch(self._records)
        if own is None:
            raise ContractViolation("there is no epoch to take again")
        return self.append(
            own.model_copy(
                update={
                    "epoch": own.epoch + 1,
                    "time": time,
                    "reason": reason,
                    "restored": restored.policy,
                    "restored_seq": restored.seq,
                    "lease_s": None,
                }
            )
        )

    def check(self, epoch: int) -> tuple[Record, ...]:
        """Read the chain and make sure that ``epoch`` is still the newest.

        For views only: history needs no check, since ``append`` cannot succeed for an old owner.

        Raises:
            FencedError: if a newer owner exists.
        """
        records = self.read()
        newest = newest_epoch(records)
        if newest is None or newest.epoch != epoch:
            raise FencedError(
                f"epoch {epoch} is over: {_owner(newest)}",
                epoch=epoch,
                newest=newest.epoch if newest else None,
            )
        return records

    def _check_epoch(self, record: Record) -> None:
        newest = newest_epoch(self._records)
        current = newest.epoch if newest else 0
        if isinstance(record, EpochRecord):
            if record.epoch != current + 1:
                raise ContractViolation(
                    f"epoch {record.epoch} cannot follow epoch {current}", epoch=record.epoch
                )
            if (record.lease_s is not None) != (not self._records):
                raise ContractViolation("the lease's duration is written once, in chain/0")
        elif record.epoch != current:
            raise self._fenced(record, f"the newest epoch is {current}")

    def _fenced(self, record: Record, found: str) -> FencedError:
        message = f"epoch {record.epoch} may not append its {record.kind} record: {found}"
        self._superseded = message
        return FencedError(message, record=record.kind, epoch=record.epoch)

    def _highest_listed(self) -> int:
        try:
            names = [p.name for p in self._folder.iterdir()]
        except FileNotFoundError:
            return -1
        return max((int(m[1]) for n in names if (m := _NAME.fullmatch(n))), default=-1)


def lease_duration(records: tuple[Record, ...]) -> float | None:
    """The lease's duration as chain/0 has it; None for a chain without records."""
    if not records:
        return None
    first = records[0]
    if not isinstance(first, EpochRecord) or first.lease_s is None:
        raise ChainUnreadable("chain/0.json is no epoch record with a lease", record="chain/0.json")
    return first.lease_s


def _owner(newest: EpochRecord | None) -> str:
    if newest is None:
        return "the chain has no epoch"
    owner = f"attempt {newest.attempt}, pid {newest.pid} on {newest.host}"
    return f"epoch {newest.epoch} belongs to {owner}"
