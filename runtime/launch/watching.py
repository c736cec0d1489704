"""Following a submitted run: where its attempt stands, and whether another one is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.load import LoadedRun
from runtime.errors import RetryBy
from runtime.launch.receipts import LaunchReceipt
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.submitting import Sender, is_reachable
from runtime.launch.telling import end_of, named, told
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.presence import Presence
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EndRecord, Record
from runtime.session.ends import EndedBy

MOST_WITHOUT_COMMIT = 5
"""Attempts in a row that may be lost before one of them has committed; one that another owner of
the run turned away is none of them."""
MOST_TURNED_AWAY = 5
"""Attempts in a row."""
MOST_ATTEMPTS = 100
"""Of a run, resubmitted by itself."""
BACKOFF_S = 10.0
"""Before the second attempt; doubles with each that follows without a commit between."""
LONGEST_BACKOFF_S = 600.0
END_LAG_S = 120.0
"""For an end record to be seen from here, once its guard has left: file systems that are shared
keep what they have seen of a folder for a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What comes next."""

    what: Literal["wait", "again", "over"]
    why: str = ""
    """Empty where an attempt is waited for that simply is not over."""
    delay_s: float = 0.0
    """Before another attempt is submitted."""
    lost_attempt: int = 0
    """The newest attempt that is known to be lost, where that is another than the one looked at."""


def decide(
    standing: AttemptStanding,
    *,
    attempt: int,
    auto_resume: str,
    last_committing: int,
    turned_away: int = 0,
    is_deterministic: bool = False,
) -> Decision:
    """Whether another attempt follows this one. Pure.

    Args:
        standing: of the newest attempt.
        attempt: its number.
        auto_resume: of the run file; only ``milepost`` submits here.
        last_committing: the attempt that made the newest commit, 0 before there is one.
        turned_away: of the attempts since then, those that another owner turned away.
        is_deterministic: the attempt failed as one before it did, with no commit between.
    """
    if not standing.kind.is_over:
        return Decision(what="wait")
    if not standing.kind.is_taken_away:
        return Decision(what="over", why=standing.kind)
    if auto_resume != "milepost":
        return Decision(what="over", why=f"{standing.kind}; {_whose(auto_resume)}")
    if any(not rank.kind.is_over for rank in standing.ranks):
        # They have not heard yet, and one of them may own the run: the next would be turned away.
        return Decision(what="wait", why=standing.reason or standing.raw)
    if is_deterministic:
        return Decision(what="over", why="the same failure twice without a commit between")
    fruitless = attempt - last_committing - turned_away
    if fruitless >= MOST_WITHOUT_COMMIT:
        return Decision(what="over", why=f"{fruitless} attempts without a commit")
    if attempt >= MOST_ATTEMPTS:
        return Decision(what="over", why=f"{attempt} attempts")
    why = standing.reason or standing.raw
    return Decision(what="again", why=why, delay_s=_back_off_s(fruitless))


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who had the run when an attempt was turned away."""

    state: Literal["alive", "away", "ended", "unknown"]
    """``away``: another attempt may take the run up, or finds it complete; ``ended``: none may."""
    what: str
    """Which one, and what became of it."""
    attempt: int = 0
    """Its attempt; 0 where nobody can tell."""


def decide_turned_away(
    standing: AttemptStanding, owner: Owner, *, auto_resume: str, in_a_row: int, attempt: int
) -> Decision:
    """Whether another attempt follows one that was turned away. Pure.

    Args:
        standing: of that attempt.
        owner: who had the run.
        auto_resume: of the run file; only ``milepost`` submits here.
        in_a_row: attempts that were turned away one after the other, this one among them.
        attempt: its number.
    """
    if auto_resume != "milepost":
        return Decision(what="over", why=_whose(auto_resume))
    if owner.state == "alive":
        return _waiting_for(owner)
    if any(not rank.kind.is_over for rank in standing.ranks):
        return Decision(what="wait", why="other ranks of it still run")
    if owner.state == "ended":
        return Decision(what="over", why=owner.what)
    if in_a_row >= MOST_TURNED_AWAY:
        return Decision(what="over", why=f"{in_a_row} attempts in a row were turned away")
    if attempt >= MOST_ATTEMPTS:
        return Decision(what="over", why=f"{attempt} attempts")
    return Decision(
        what="again", why=owner.what, delay_s=_back_off_s(in_a_row), lost_attempt=owner.attempt
    )


class Watcher:
    """Looks at the newest attempt of one run, again and again.

    Its only state is when the run's owner was last seen to be there, and since when an end is
    missing.
    """

    def __init__(self, loaded: LoadedRun, sender: Sender) -> None:
        """Follow the run of a file through the backend that it was sent with."""
        self._spec = loaded.spec
        self._sender = sender
        self._root = RunRoot.of(loaded.spec.output.root)
        self._can_read = is_reachable(loaded, self._root)
        self._presence = Presence(self._root, clock=sender.clock, here=HostBoot.here())
        self._unconfirmed: tuple[int, float] | None = None

    def receipt(self, attempt: int) -> LaunchReceipt | None:
        """The receipt of an attempt; None if it was submitted from elsewhere."""
        return self._sender.receipts.read(self._spec.name, self._root.path, attempt)

    def look(self, attempt: int) -> AttemptStanding:
        """Where an attempt stands: its scheduler's word, and its own last one.

        What the scheduler tells of its GPUs is kept in the receipt, and that the attempt was turned
        away.

        Raises:
            ServiceUnavailable: if the scheduler does not answer.
        """
        end = end_of(self._records() or (), attempt)
        if end is not None and end.state == "complete":
            return AttemptStanding(kind=AttemptClass.SUCCEEDED, raw="complete")
        receipt = self.receipt(attempt)
        if receipt is None:
            standing = AttemptStanding(
                kind=AttemptClass.STOPPED, raw="no receipt", reason="submitted from elsewhere"
            )
            return told(standing, self._records(), attempt)
        standing = self._sender.backend.look(receipt)
        self._sender.receipts.note_gpus(
            receipt, active=standing.active_gpus, allocated=standing.allocated_gpus
        )
        # Read after the scheduler was asked: what ended meanwhile has its end by now.
        standing = told(standing, self._records(), attempt)
        if standing.is_turned_away:
            self._sender.receipts.note_turned_away(receipt)
        return standing

    def decide(self, attempt: int, standing: AttemptStanding) -> Decision:
        """What follows; see ``decide`` and ``decide_turned_away``.

        No attempt is sent while an older one may own the run, as far as that can be seen from here.
        """
        records = self._records() or ()
        if self._may_be_late(attempt, standing):
            return Decision(what="wait", why=standing.reason)
        if standing.is_turned_away:
            return decide_turned_away(
                standing,
                self._owner(records),
                auto_resume=self._spec.launch.auto_resume,
                in_a_row=1 + self._turned_away_before(attempt),
                attempt=attempt,
            )
        end, committing = end_of(records, attempt), last_committing(records)
        failure = end.failure if end is not None else None
        decision = decide(
            standing,
            attempt=attempt,
            auto_resume=self._spec.launch.auto_resume,
            last_committing=committing,
            turned_away=sum(self._was_turned_away(n) for n in range(committing + 1, attempt)),
            is_deterministic=failure is not None
            and not failure.is_exempt
            and history.is_deterministic(records, failure.fingerprint),
        )
        epoch = history.newest_epoch(records)
        if decision.what == "again" and epoch is not None and epoch.attempt < attempt:
            # An older one that was lost by mistake would turn the next away.
            owner = self._owner(records)
            return _waiting_for(owner) if owner.state == "alive" else decision
        return decision

    def _records(self) -> tuple[Record, ...] | None:
        return Chain(self._root).read() if self._can_read else None

    def _may_be_late(self, attempt: int, standing: AttemptStanding) -> bool:
        """Whether the end of an attempt may still come to be seen."""
        if not standing.is_unconfirmed:
            self._unconfirmed = None
            return False
        now = self._sender.clock.monotonic()
        if self._unconfirmed is None or self._unconfirmed[0] != attempt:
            self._unconfirmed = (attempt, now)
        return now - self._unconfirmed[1] < END_LAG_S

    def _owner(self, records: tuple[Record, ...]) -> Owner:
        epoch, end = history.newest_epoch(records), history.current_end(records)
        if epoch is None:
            return Owner(state="unknown", what="the owner of the run cannot be seen from here")
        if end is not None:
            state = "away" if _may_follow(end) else "ended"
            said = end.failure.message if end.failure else end.ended_by
            what = f"{named(epoch)} ended: {said}"
        else:
            gone = self._presence.gone(records)
            state = "alive" if gone is None else "away"
            what = gone or f"{named(epoch)} has the run"
        return Owner(state=state, what=what, attempt=epoch.attempt)

    def _turned_away_before(self, attempt: int) -> int:
        """How many attempts just before this one were turned away, without a gap."""
        number = attempt - 1
        while number > 0 and self._was_turned_away(number):
            number -= 1
        return attempt - 1 - number

    def _was_turned_away(self, attempt: int) -> bool:
        receipt = self.receipt(attempt)
        return receipt is not None and receipt.turned_away


def _waiting_for(owner: Owner) -> Decision:
    return Decision(what="wait", why=f"{owner.what}; `milepost stop` ends it")


def last_committing(records: tuple[Record, ...]) -> int:
    """The attempt that made the newest commit; 0 before there is one."""
    commit = history.newest_commit(records)
    if commit is None:
        return 0
    by = history.newest_epoch(records[: commit.seq])
    return by.attempt if by is not None else 0


def _may_follow(end: EndRecord) -> bool:
    """Whether another attempt has something to do after this end, if only to find the run complete.

    Who is preempted commits and leaves in good order, without a failure.
    """
    if end.failure is not None:
        return end.failure.retry is RetryBy.LAUNCH
    return end.state == "complete" or end.ended_by == EndedBy.SIGTERM


def _whose(auto_resume: str) -> str:
    whose = "the scheduler's" if auto_resume == "scheduler" else "a person's"
    return f"going on is {whose} decision"


def _back_off_s(in_a_row: int) -> float:
    return min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** max(0, in_a_row - 1))
