"""Where every prompt of the passes begun stands.

                  requeue (head of the queue)
                 +---------------------------+
                 v                           |
    remaining -> in flight -> finished ------+--> consumed            by an update
                    |            |           +--> filtered | dropped | skipped
                    +------------+-----------------------^

``pending`` is everything that was admitted and has no end: queued for another attempt, in flight,
or finished and unconsumed. Each event costs O(1); memory holds what is pending plus 24 bytes for
every end since the last commit, whatever the number of prompts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, Self

from runtime.data.entries import Admission, Ends, LedgerCounts, OpenPrompt, Stage
from runtime.data.order import PromptOrder
from runtime.data.samples import PromptId
from runtime.data.segments import (
    EMPTY_DIGEST,
    LedgerSegment,
    OrderIdentity,
    Pending,
    Totals,
    check_links,
    extend_digest,
    num_begun,
)
from runtime.errors import ContractViolation

STALE = "stale"
"""Requeue reason of a group that the next publication would have made too old."""

End = Literal["consumed", "filtered", "dropped", "skipped"]
_ENDS: tuple[End, ...] = ("consumed", "filtered", "dropped", "skipped")
GroupKey = tuple[PromptId, int]
"""Prompt id and attempt."""


class Ledger:
    """The one owner of prompt states. Sync, thread-safe, awaits nothing.

    Events of an attempt that is no longer the present one return False and change nothing.
    """

    def __init__(self, order: PromptOrder) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._cursor = 0
        self._open: dict[PromptId, OpenPrompt] = {}
        self._queue: deque[PromptId] = deque()
        self._stages = dict.fromkeys(Stage, 0)
        self._num_requeued = 0
        self._totals: dict[End, int] = dict.fromkeys(_ENDS, 0)
        self._ends: dict[End, Ends] = {kind: Ends() for kind in _ENDS}
        self._digest = EMPTY_DIGEST
        self._last_update = -1
        self._parent: str | None = None

    # --- Events -----------------------------------------------------------------------------

    def admit(self) -> Admission | None:
        """Hand out the next prompt: head of the queue first, then the cursor.

        Returns:
            None when nothing waits to be admitted. More may come back by ``requeue`` while
            something is pending; ``is_exhausted`` says when nothing ever will.
        """
        with self._lock:
            if self._queue:
                prompt = self._queue.popleft()
                opened = self._open[prompt]
                opened.attempt += 1
                self._move(opened, Stage.IN_FLIGHT)
            elif self._cursor < self._order.total:
                prompt = self._order.at(self._cursor)
                opened = OpenPrompt(self._cursor, 1, Stage.IN_FLIGHT)
                self._open[prompt] = opened
                self._stages[Stage.IN_FLIGHT] += 1
                self._cursor += 1
            else:
                return None
            return Admission(prompt_id=prompt, attempt=opened.attempt, num_stale=opened.num_stale)

    def finish(self, prompt_id: PromptId, attempt: int) -> bool:
        """The group is whole and judged; it may wait in the buffer. False if it is a late event."""
        with self._lock:
            opened = self._present(prompt_id, attempt)
            if opened is None or opened.stage is not Stage.IN_FLIGHT:
                return False
            self._move(opened, Stage.FINISHED)
            return True

    def requeue(self, prompt_id: PromptId, attempt: int, reason: str) -> bool:
        """Send the pristine prompt back to the head of the queue. False if it is a late event.

        Args:
            prompt_id: whose group failed, was cancelled, or went unused.
            attempt: the attempt that ends with it.
            reason: why; ``STALE`` is counted for each prompt, see ``Admission.num_stale``.
        """
        with self._lock:
            opened = self._present(prompt_id, attempt)
            if opened is None:
                return False
            self._move(opened, Stage.QUEUED)
            opened.num_stale += reason == STALE
            self._queue.appendleft(prompt_id)
            self._num_requeued += 1
            return True

    def consume(self, groups: Sequence[GroupKey], update: int) -> str:
        """Mark finished groups as used by ``update``, in this order, all or none.

        Returns:
            The running digest of everything consumed so far.

        Raises:
            ContractViolation: if a group is not finished at that attempt, is named twice, or the
                update is older than the last one that consumed.
        """
        with self._lock:
            opened = [self._present(*key) for key in groups]
            bad = [
                f"{prompt} attempt {attempt}"
                for (prompt, attempt), found in zip(groups, opened, strict=True)
                if found is None or found.stage is not Stage.FINISHED
            ]
            if bad or len({prompt for prompt, _ in groups}) != len(groups):
                raise ContractViolation(
                    f"update {update} consumes groups that are not finished, or one twice: "
                    f"{bad or [str(prompt) for prompt, _ in groups]}",
                    update=update,
                )
            if update < self._last_update:
                raise ContractViolation(
                    f"update {update} consumes after update {self._last_update}", update=update
                )
            for prompt, _ in groups:
                self._end(prompt, "consumed", update)
                self._digest = extend_digest(self._digest, update, prompt)
            self._last_update = update
            return self._digest

    def digest_after(self, prompts: Iterable[PromptId], update: int) -> str:
        """The digest ``consume`` would arrive at; the trainer gets it with the batch."""
        with self._lock:
            digest = self._digest
        for prompt in prompts:
            digest = extend_digest(digest, update, prompt)
        return digest

    def filter(self, prompt_id: PromptId, attempt: int) -> bool:
        """End a group that dynamic sampling rejected. False if it is a late event."""
        return self._end_open(prompt_id, attempt, "filtered")

    def drop(self, prompt_id: PromptId, attempt: int) -> bool:
        """End a group that policy says to drop. False if it is a late event."""
        return self._end_open(prompt_id, attempt, "dropped")

    def skip(self, prompt_id: PromptId, attempt: int) -> bool:
        """End a group charged to the data-failure budget. False if it is a late event."""
        return self._end_open(prompt_id, attempt, "skipped")

    # --- Commits ----------------------------------------------------------------------------

    def snapshot(self) -> LedgerSegment:
        """Cursor, pristine ids of all pending prompts, and the ends since the parent commit.

        Changes nothing: a commit that fails is made good by a later one, which then holds the same
        ends again. ``committed`` moves the parent on.
        """
        with self._lock:
            pending = sorted(self._open.items(), key=lambda item: item[1].position)
            return LedgerSegment(
                parent=self._parent,
                order=OrderIdentity.of(self._order),
                cursor=self._cursor,
                pending=Pending(
                    pass_=tuple(p.pass_ for p, _ in pending),
                    index=tuple(p.index for p, _ in pending),
                    position=tuple(o.position for _, o in pending),
                    attempt=tuple(o.attempt for _, o in pending),
                    num_stale=tuple(o.num_stale for _, o in pending),
                ),
                consumed=self._ends["consumed"].consumed(),
                filtered=self._ends["filtered"].prompts(),
                dropped=self._ends["dropped"].prompts(),
                skipped=self._ends["skipped"].prompts(),
                totals=Totals(**self._totals, requeued=self._num_requeued),
                last_update=self._last_update,
                digest=self._digest,
            )

    def committed(self, segment: LedgerSegment) -> None:
        """The commit with this segment stands in the chain: its ends need not be held any more.

        Raises:
            ContractViolation: if the segment does not continue from the present parent.
        """
        with self._lock:
            if segment.parent != self._parent:
                raise ContractViolation(
                    "a ledger segment was committed out of turn: "
                    f"its parent is {segment.parent}, the newest commit {self._parent}"
                )
            for kind in self._ends:
                self._ends[kind].forget(len(getattr(segment, kind)))
            self._parent = segment.checksum()

    @classmethod
    def restore(cls, segments: Sequence[LedgerSegment], order: PromptOrder) -> Self:
        """Go on from the newest segment: everything pending is queued anew, oldest first.

        Args:
            segments: committed history, oldest first; only the newest is needed, links between
                those given are checked.
            order: must be the order the run began with; only ``epochs`` may be greater.

        Raises:
            ContractViolation: if there is no segment, a link is broken, the order is another one,
                or the segment does not account for every prompt.
        """
        check_links(segments)
        newest = segments[-1]
        if newest.order != OrderIdentity.of(order) or newest.cursor > order.total:
            raise ContractViolation(
                f"the ledger was made with the order {newest.order!r} up to {newest.cursor}, "
                f"this run has {OrderIdentity.of(order)!r} with {order.epochs} passes"
            )
        ledger = cls(order)
        ledger._cursor = newest.cursor
        ledger._totals = {kind: getattr(newest.totals, kind) for kind in _ENDS}
        ledger._num_requeued = newest.totals.requeued
        ledger._digest = newest.digest
        ledger._last_update = newest.last_update
        ledger._parent = newest.checksum()
        pending = newest.pending
        rows = zip(pending.ids(), pending.position, pending.attempt, pending.num_stale, strict=True)
        for prompt, position, attempt, num_stale in rows:
            if position >= newest.cursor or order.at(position) != prompt:
                raise ContractViolation(
                    f"pending prompt {prompt} is not what stands at {position} of the order"
                )
            ledger._open[prompt] = OpenPrompt(position, attempt, Stage.QUEUED, num_stale)
            ledger._queue.append(prompt)
        ledger._stages[Stage.QUEUED] = len(pending)
        ledger.check()
        return ledger

    # --- What it says -----------------------------------------------------------------------

    @property
    def is_exhausted(self) -> bool:
        """Nothing is remaining or pending: every prompt of every pass has its end."""
        with self._lock:
            return not self._open and self._cursor == self._order.total

    @property
    def digest(self) -> str:
        """Running digest of everything consumed."""
        with self._lock:
            return self._digest

    def counts(self) -> LedgerCounts:
        """All counters, from one moment. O(1)."""
        with self._lock:
            return self._counted()

    def check(self) -> None:
        """Hold the ledger to its contract; O(pending).

        Raises:
            ContractViolation: if a prompt is in no state or in two, or the queue and the stages
                disagree.
        """
        with self._lock:
            counts = self._counted()
            queued = {p for p, o in self._open.items() if o.stage is Stage.QUEUED}
            is_consistent = (
                len(queued) == len(self._queue) == counts.queued
                and queued == set(self._queue)
                and counts.queued + counts.in_flight + counts.finished == counts.pending
            )
        if counts.lost or counts.doubled or not is_consistent:
            raise ContractViolation(
                f"the ledger does not account for every prompt: {counts.lost} lost, "
                f"{counts.doubled} doubled, {len(queued)} queued of {counts.queued}",
                lost=counts.lost,
                doubled=counts.doubled,
            )

    # --- Under the lock ---------------------------------------------------------------------

    def _counted(self) -> LedgerCounts:
        ended = sum(self._totals.values())
        gap = self._cursor - ended - len(self._open)
        return LedgerCounts(
            remaining=num_begun(self._cursor, self._order.num_prompts) - self._cursor,
            pending=len(self._open),
            **self._totals,
            requeued=self._num_requeued,
            lost=max(0, gap),
            doubled=max(0, -gap),
            digest=self._digest,
            queued=self._stages[Stage.QUEUED],
            in_flight=self._stages[Stage.IN_FLIGHT],
            finished=self._stages[Stage.FINISHED],
        )

    def _present(self, prompt: PromptId, attempt: int) -> OpenPrompt | None:
        opened = self._open.get(prompt)
        if opened is None or opened.attempt != attempt or opened.stage is Stage.QUEUED:
            return None
        return opened

    def _move(self, opened: OpenPrompt, stage: Stage) -> None:
        self._stages[opened.stage] -= 1
        self._stages[stage] += 1
        opened.stage = stage

    def _end_open(self, prompt: PromptId, attempt: int, kind: End) -> bool:
        with self._lock:
            if self._present(prompt, attempt) is None:
                return False
            self._end(prompt, kind)
            return True

    def _end(self, prompt: PromptId, kind: End, update: int = -1) -> None:
        opened = self._open.pop(prompt)
        self._stages[opened.stage] -= 1
        self._totals[kind] += 1
        self._ends[kind].append(prompt, update)
