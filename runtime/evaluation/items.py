"""``items.jsonl``: every judged prompt of one evaluation, so that a resumed one repeats none.

Unlike telemetry this is evidence: what cannot be written fails the evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.evaluation.metrics import Judged
from runtime.rundir import atomic


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ItemSample(_Stored):
    """One response and its verdict."""

    text: str
    reward: float
    num_tokens: int = Field(ge=0)
    capped: bool
    """Cut off at the longest allowed response."""


class Item(_Stored):
    """One prompt, done or given up."""

    schema_version: Literal[1] = 1
    set_digest: str
    """What was asked; rows of another digest are not this evaluation's."""
    policy: str
    """Policy id that answered."""
    attempt: int
    epoch: int
    index: int = Field(ge=0)
    """Row of the prompt in the frozen file."""
    state: Literal["done", "missing"]
    """``missing``: the verifier failed twice; no zero stands in for it."""
    samples: tuple[ItemSample, ...] = ()
    error: str | None = None
    time: float

    @model_validator(mode="after")
    def _samples_fit(self) -> Self:
        if (self.state == "done") != bool(self.samples):
            raise ValueError(f"an item that is {self.state} with {len(self.samples)} samples")
        return self

    def judged(self) -> Judged:
        """For the metrics; ValueError for a missing item."""
        return Judged(
            rewards=tuple(s.reward for s in self.samples),
            lengths=tuple(s.num_tokens for s in self.samples),
            capped=tuple(s.capped for s in self.samples),
        )


class ItemLog:
    """The items of one (policy, set). One writer; a reader may read beside it."""

    def __init__(self, path: Path, *, set_digest: str, policy: str) -> None:
        self.path = path
        self._set_digest = set_digest
        self._policy = policy
        self.num_damaged = 0
        """Lines of the last ``read`` that were no item: half a line is what a kill leaves."""

    def append(self, item: Item) -> None:
        """Add one item.

        Raises:
            ValueError: if it belongs to another evaluation.
            DiskFull: if there was no space; a half-written line is skipped by readers.
        """
        if (item.set_digest, item.policy) != (self._set_digest, self._policy):
            raise ValueError(
                f"item {item.index} of {item.policy} does not belong to {self._policy} here"
            )
        line = item.model_dump_json().encode() + b"\n"
        with atomic.disk_full_as_error(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.point("append", self.path)
            with self.path.open("a+b", buffering=0) as file:
                if not _ends_a_line(file.fileno()):
                    line = b"\n" + line
                done = 0
                while done < len(line):
                    done += file.write(line[done:]) or 0

    def read(self) -> dict[int, Item]:
        """Items of this evaluation by index, ascending. Done wins over missing, then the first."""
        found: dict[int, Item] = {}
        self.num_damaged = 0
        data = atomic.read_bytes(self.path) or b""
        for line in data.splitlines():
            try:
                item = Item.model_validate_json(line)
            except ValidationError:
                self.num_damaged += bool(line.strip())
                continue
            if (item.set_digest, item.policy) != (self._set_digest, self._policy):
                continue
            known = found.get(item.index)
            if known is None or (known.state == "missing" and item.state == "done"):
                found[item.index] = item
        return dict(sorted(found.items()))

    def remaining(self, indices: Iterable[int]) -> list[int]:
        """Those of ``indices`` without an item yet, in their order."""
        found = self.read()
        return [index for index in indices if index not in found]


def _ends_a_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"
