"""The ledger as a commit stores it: what ended since the parent commit, and what is still open.

A segment is enough to go on from (cursor, pending, totals); the chain of segments back to commit 0
is the history of every prompt.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.data.order import PromptOrder
from runtime.data.samples import PromptId
from runtime.errors import ContractViolation, PartialWrite

Count = Annotated[int, Field(ge=0)]
Column = tuple[int, ...]

EMPTY_DIGEST = hashlib.sha256(b"milepost.consumed.v1").hexdigest()


def extend_digest(digest: str, update: int, prompt: PromptId) -> str:
    """Running SHA-256 over (update, group id) of everything consumed, in order.

    ``d' = sha256(d || "<update> <prompt id>")``: unlike a hash object it can be stored and gone on
    with.
    """
    return hashlib.sha256(bytes.fromhex(digest) + f"{update} {prompt}".encode()).hexdigest()


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class OrderIdentity(_Stored):
    """What fixes the order of prompts. The number of passes may grow, so it is not part of it."""

    num_prompts: int = Field(ge=1)
    seed: int
    shuffle: bool

    @classmethod
    def of(cls, order: PromptOrder) -> Self:
        """The identity of an order."""
        return cls(num_prompts=order.num_prompts, seed=order.seed, shuffle=order.shuffle)


class Prompts(_Stored):
    """Prompt ids as two columns of equal length, in order."""

    pass_: Column = ()
    index: Column = ()

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if len(self.pass_) != len(self.index):
            raise ValueError(f"{len(self.pass_)} passes for {len(self.index)} rows")
        return self

    def __len__(self) -> int:
        return len(self.index)

    def ids(self) -> list[PromptId]:
        """The prompt ids."""
        return [PromptId(p, i) for p, i in zip(self.pass_, self.index, strict=True)]


class Consumed(Prompts):
    """Consumed prompts with the update that used each, in the order of consumption."""

    update: Column = ()

    @model_validator(mode="after")
    def _update_for_each(self) -> Self:
        if len(self.update) != len(self.index):
            raise ValueError(f"{len(self.update)} updates for {len(self.index)} rows")
        return self


class Pending(Prompts):
    """Pristine ids of all prompts admitted and without an end, oldest in the order first."""

    position: Column = ()
    """Place in the order, over all passes."""
    attempt: Column = ()
    """Attempts so far, the present one included."""
    num_stale: Column = ()
    """How often a group was sent back because it had grown too old."""

    @model_validator(mode="after")
    def _columns_for_each(self) -> Self:
        if not len(self.position) == len(self.attempt) == len(self.num_stale) == len(self.index):
            raise ValueError("columns of pending prompts differ in length")
        return self


class Totals(_Stored):
    """How many prompts reached each end since the run began, and group attempts sent back."""

    consumed: Count = 0
    filtered: Count = 0
    dropped: Count = 0
    skipped: Count = 0
    requeued: Count = 0

    @property
    def ended(self) -> int:
        """Prompts with an end."""
        return self.consumed + self.filtered + self.dropped + self.skipped


class LedgerSegment(_Stored):
    """One commit's part of the ledger. Cost: ends since the parent plus what is pending."""

    schema_version: Literal[1] = 1
    parent: str | None
    """Checksum of the parent commit's segment; None in commit 0."""
    order: OrderIdentity
    cursor: Count
    """Prompts taken from the order so far, over all passes."""
    pending: Pending
    consumed: Consumed
    filtered: Prompts
    dropped: Prompts
    skipped: Prompts
    """The four ends since the parent commit."""
    totals: Totals
    last_update: int
    """Update of the newest consumption; -1 before the first."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Running digest of everything consumed."""

    def checksum(self) -> str:
        """SHA-256 of the canonical JSON; goes into the commit record."""
        return hashlib.sha256(self._canonical()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical JSON, gzip-compressed; the same segment gives the same bytes."""
        return gzip.compress(self._canonical(), compresslevel=6, mtime=0)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        """Read what ``to_bytes`` wrote.

        Raises:
            PartialWrite: if the bytes are cut off or altered, or of a schema this version cannot
                read.
        """
        try:
            # JSON mode: tuples arrive as arrays, which strict Python mode would refuse.
            return cls.model_validate_json(gzip.decompress(blob))
        except (OSError, EOFError, zlib.error, ValidationError) as exc:
            raise PartialWrite(
                f"ledger segment of {len(blob)} bytes cannot be read: {exc}", num_bytes=len(blob)
            ) from exc

    def _canonical(self) -> bytes:
        content = self.model_dump(mode="json")
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def num_begun(cursor: int, num_prompts: int) -> int:
    """Prompts of the passes begun; the first pass is begun before its first prompt is admitted."""
    return max(1, -(-cursor // num_prompts)) * num_prompts


def check_links(segments: Sequence[LedgerSegment]) -> None:
    """Each segment must continue the one before it.

    Raises:
        ContractViolation: if there is none, or a link is broken.
    """
    if not segments:
        raise ContractViolation("no ledger segment: a run without commit 0 starts fresh")
    for i, (parent, child) in enumerate(pairwise(segments)):
        if child.parent != parent.checksum():
            raise ContractViolation(
                f"ledger segment {i + 1} does not continue segment {i}: its parent is "
                f"{child.parent}, the segment before it {parent.checksum()}"
            )
