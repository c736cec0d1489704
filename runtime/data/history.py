"""What committed history says about every prompt: the answer of ``milepost ledger``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.data.order import PromptOrder
from runtime.data.samples import PromptId
from runtime.data.segments import (
    EMPTY_DIGEST,
    LedgerSegment,
    Prompts,
    check_links,
    extend_digest,
    num_begun,
)
from runtime.errors import ContractViolation

_ENDS = ("consumed", "filtered", "dropped", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """Counts over committed history; field names are those of ``milepost ledger --json``."""

    consumed: int
    filtered: int
    dropped: int
    skipped: int
    pending: int
    remaining: int
    requeued: int
    lost: int
    """Prompts of the passes begun that are in no state."""
    doubled: int
    """Prompts that ended more than once, or ended and are open too."""
    digest: str


def read_history(segments: Sequence[LedgerSegment]) -> LedgerReport:
    """Count every prompt by looking at every end, not by trusting totals.

    Args:
        segments: the standing commits' segments, oldest first, from commit 0 on.

    Raises:
        ContractViolation: if a link is broken, commit 0 is missing, or the digest that follows from
            the consumed prompts is not the one stored.
    """
    check_links(segments)
    if segments[0].parent is not None:
        raise ContractViolation(
            f"ledger history begins in the middle: parent {segments[0].parent} is not given"
        )
    newest = segments[-1]
    num_rows = newest.order.num_prompts
    num_ends = np.zeros(num_begun(newest.cursor, num_rows), np.uint8)
    counts = dict.fromkeys(_ENDS, 0)
    digest = EMPTY_DIGEST
    for i, segment in enumerate(segments):
        for kind in _ENDS:
            ended: Prompts = getattr(segment, kind)
            counts[kind] += len(ended)
            _tally(num_ends, ended, num_rows)
        for prompt, update in _consumed(segment):
            digest = extend_digest(digest, update, prompt)
        if digest != segment.digest:
            raise ContractViolation(
                f"ledger segment {i} stores the digest {segment.digest}, its prompts give {digest}"
            )
    num_states = num_ends.copy()
    _tally(num_states, newest.pending, num_rows)
    num_remaining = _tally_remaining(num_states, newest)
    return LedgerReport(
        **counts,
        pending=len(newest.pending),
        remaining=num_remaining,
        requeued=newest.totals.requeued,
        lost=int(np.count_nonzero(num_states == 0)),
        doubled=int(np.count_nonzero(num_states > 1)),
        digest=digest,
    )


def consumed_prompts(segments: Sequence[LedgerSegment]) -> Iterator[tuple[PromptId, int]]:
    """Every consumed prompt with the update that used it, in order (for ``--prompts``)."""
    for segment in segments:
        yield from _consumed(segment)


def _consumed(segment: LedgerSegment) -> Iterator[tuple[PromptId, int]]:
    yield from zip(segment.consumed.ids(), segment.consumed.update, strict=True)


def _tally(num_states: NDArray[np.uint8], prompts: Prompts, num_rows: int) -> None:
    """Count each prompt once more; a count stops at 255 so that it cannot wrap back to one."""
    if not len(prompts):
        return
    places = np.asarray(prompts.pass_, np.int64) * num_rows + np.asarray(prompts.index, np.int64)
    if places.min() < 0 or places.max() >= num_states.size or max(prompts.index) >= num_rows:
        raise ContractViolation("the ledger names a prompt outside the passes begun")
    unique, times = np.unique(places, return_counts=True)
    total = num_states[unique].astype(np.int64) + times
    num_states[unique] = np.minimum(total, 255)


def _tally_remaining(num_states: NDArray[np.uint8], newest: LedgerSegment) -> int:
    num_rows = newest.order.num_prompts
    num_remaining = num_states.size - newest.cursor
    if not num_remaining:
        return 0
    last = num_states.size // num_rows - 1
    order = PromptOrder(
        num_rows, epochs=last + 1, seed=newest.order.seed, shuffle=newest.order.shuffle
    )
    rows = order.rows(last)[num_rows - num_remaining :]
    num_states[last * num_rows + rows.astype(np.int64)] += 1
    return num_remaining
