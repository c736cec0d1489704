"""Following a submitted run: where its attempt stands, and whether another one is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.load import LoadedRun
from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptClass, AttemptStanding, with_end
from runtime.launch.submitting import Sender, is_reachable
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord, Record

MOST_WITHOUT_COMMIT = 5
"""Attempts in a row that may be lost before one of them has committed."""
MOST_ATTEMPTS = 100
"""Of a run, resubmitted by itself."""
BACKOFF_S = 10.0
"""Before the second attempt; doubles with each that follows without a commit between."""
LONGEST_BACKOFF_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What comes next."""

    what: Literal["wait", "again", "over"]
    why: str = ""
    delay_s: float = 0.0
    """Before another attempt is submitted."""


def decide(
    standing: AttemptStanding,
    *,
    attempt: int,
    auto_resume: str,
    last_committing: int,
    is_deterministic: bool = False,
) -> Decision:
    """Whether another attempt follows this one. Pure.

    Args:
        standing: of the newest attempt.
        attempt: its number.
        auto_resume: of the run file; only ``milepost`` submits here.
        last_committing: the attempt that made the newest commit, 0 before there is one.
        is_deterministic: the attempt failed as one before it did, with no commit between.
    """
    if not standing.kind.is_over:
        return Decision(what="wait")
    if not standing.kind.is_taken_away:
        return Decision(what="over", why=standing.kind)
    if auto_resume != "milepost":
        whose = "the scheduler's" if auto_resume == "scheduler" else "a person's"
        return Decision(what="over", why=f"{standing.kind}; going on is {whose} decision")
    if any(not rank.kind.is_over for rank in standing.ranks):
        # They have not heard yet, and one of them may own the run: the next would be turned away.
        return Decision(what="wait", why=standing.reason or standing.raw)
    if is_deterministic:
        return Decision(what="over", why="the same failure twice without a commit between")
    fruitless = attempt - last_committing
    if fruitless >= MOST_WITHOUT_COMMIT:
        return Decision(what="over", why=f"{fruitless} attempts without a commit")
    if attempt >= MOST_ATTEMPTS:
        return Decision(what="over", why=f"{attempt} attempts")
    delay_s = min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** max(0, fruitless - 1))
    return Decision(what="again", why=standing.reason or standing.raw, delay_s=delay_s)


class Watcher:
    """Looks at the newest attempt of one run, again and again. Holds no state of its own."""

    def __init__(self, loaded: LoadedRun, sender: Sender) -> None:
        """Follow the run of a file through the backend that it was sent with."""
        self._spec = loaded.spec
        self._sender = sender
        self._root = RunRoot.of(loaded.spec.output.root)
        self._can_read = is_reachable(loaded, self._root)

    def receipt(self, attempt: int) -> LaunchReceipt | None:
        """The receipt of an attempt; None if it was submitted from elsewhere."""
        return self._sender.receipts.read(self._spec.name, self._root.path, attempt)

    def look(self, attempt: int) -> AttemptStanding:
        """Where an attempt stands: its scheduler's word, and its own last one.

        What the scheduler tells of its GPUs is kept in the receipt.

        Raises:
            ServiceUnavailable: if the scheduler does not answer.
        """
        records = self._records()
        end = end_of(records, attempt)
        if end is not None and history.is_complete(records):
            return AttemptStanding(kind=AttemptClass.SUCCEEDED, raw="complete")
        receipt = self.receipt(attempt)
        if receipt is None:
            return AttemptStanding(
                kind=AttemptClass.STOPPED, raw="no receipt", reason="submitted from elsewhere"
            )
        standing = self._sender.backend.look(receipt)
        self._sender.receipts.note_gpus(
            receipt, active=standing.active_gpus, allocated=standing.allocated_gpus
        )
        return with_end(standing, end)

    def decide(self, attempt: int, standing: AttemptStanding) -> Decision:
        """What follows; see ``decide``."""
        records = self._records()
        end = end_of(records, attempt)
        failure = end.failure if end is not None else None
        return decide(
            standing,
            attempt=attempt,
            auto_resume=self._spec.launch.auto_resume,
            last_committing=last_committing(records),
            is_deterministic=failure is not None
            and not failure.is_exempt
            and history.is_deterministic(records, failure.fingerprint),
        )

    def _records(self) -> tuple[Record, ...]:
        return Chain(self._root).read() if self._can_read else ()


def end_of(records: tuple[Record, ...], attempt: int) -> EndRecord | None:
    """The end record of an attempt, if the newest epoch is one of its and has ended."""
    epoch = history.newest_epoch(records)
    if epoch is None or epoch.attempt != attempt:
        return None
    return history.current_end(records)


def last_committing(records: tuple[Record, ...]) -> int:
    """The attempt that made the newest commit; 0 before there is one."""
    commit = history.newest_commit(records)
    if commit is None:
        return 0
    by = history.newest_epoch(records[: commit.seq])
    return by.attempt if by is not None else 0
