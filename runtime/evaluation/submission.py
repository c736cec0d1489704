"""Which evaluations of a run are submitted now, and submitting each of them once.

Receipts decide; whoever submits keeps nothing. A try is claimed before the call, so a lost answer,
or two submitters at once, submit once: the claim's key is asked for again under the same name.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from filelock import SoftFileLease, Timeout

from runtime.clock import Clock
from runtime.errors import RunError, StoreError
from runtime.evaluation.background import IN_FLIGHT
from runtime.evaluation.files import claim_try, finish_try, has_open_try
from runtime.evaluation.found import evaluation_folders
from runtime.evaluation.job import JobOrder
from runtime.evaluation.reading import readings_of
from runtime.evaluation.receipts import (
    FIRST_DELAY_S,
    MAX_RESUBMISSIONS,
    RESUBMITTED,
    EvaluationReceipt,
    derive,
    num_resubmissions,
)
from runtime.evaluation.records import Result, Submission, Try
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record

JobState = Literal["absent", "alive", "over"]
_TURN_S = 15.0
"""Lease of a pass over one run; a submitter that dies holds the next one up for as long."""


class JobsAway(RunError):
    """Nothing takes submissions at the moment; the receipts stay as they are."""

    next_check = "the Prefect server, and `milepost up` for its deployments and a worker"


class Jobs(Protocol):
    """Where evaluations are submitted to."""

    def check(self) -> None:
        """Raise JobsAway where nothing would take a submission; asked before any claim."""
        ...

    def state(self, key: str) -> JobState:
        """What became of a submission by its key. JobsAway where that cannot be known now."""
        ...

    def submit(self, key: str, order: JobOrder) -> str:
        """Submit; the same key twice is one job.

        Returns:
            Its id.

        Raises:
            JobsAway: if it may not have arrived.
        """
        ...


Verdict = Literal["done", "given_up", "in_flight", "waits", "submitted", "reported", "voided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One evaluation after a pass."""

    root: RunRoot
    folder: Path
    """``evaluations/<policy>/<set>``."""
    receipt: EvaluationReceipt | None
    """None: it cannot be read."""
    verdict: Verdict
    """``reported``: a person must act; ``given_up``: cap or the same failure twice."""
    why: str
    job: str | None = None
    """Of the newest try."""

    @property
    def asked(self) -> str:
        """Policy and set, in words."""
        return f"{self.folder.parent.name} {self.folder.name}"

    @property
    def update(self) -> int:
        """Of its policy."""
        return PolicyId.parse(self.folder.parent.name).update


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a pass decides."""

    by: str
    """Who submits, for the claim."""
    force: bool = False
    """By hand: cap, delay and repeated failures set aside."""
    first_delay_s: float = FIRST_DELAY_S
    asked: frozenset[Path] = frozenset()
    """Folders of evaluations that a person names: owed or not, these are submitted, and no others.
    Empty: whatever is due."""


@dataclass(slots=True)
class _Pass:
    root: RunRoot
    records: tuple[Record, ...]
    jobs: Jobs
    rules: Rules
    clock: Clock
    in_flight: int = 0

    def rows(self) -> Iterator[Row]:
        open_: list[tuple[Path, EvaluationReceipt]] = []
        others: list[tuple[Path, EvaluationReceipt]] = []
        delay_s = self.rules.first_delay_s
        for folder, read in readings_of(self.root, self.records, first_delay_s=delay_s):
            if isinstance(read, StoreError):
                if row := self._unread(folder, read):
                    yield row
                continue
            receipt = self._ended(folder, read)
            (open_ if receipt.open_try is not None else others).append((folder, receipt))
        for folder, receipt in open_:
            row = self._open(folder, receipt)  # whoever it is for, it has one of the places
            if self._is_asked(folder):
                yield row
        # The run's last update first: its number is what people wait for.
        others.sort(key=lambda each: (not self._is_final(each[1]), each[1].update))
        for folder, receipt in others:
            if self._is_asked(folder):
                yield self._closed(folder, receipt)

    def _unread(self, folder: Path, error: StoreError) -> Row | None:
        # Whether its job is still there cannot be told; what it may hold is not given away.
        self.in_flight += has_open_try(folder)
        if not self._is_asked(folder):
            return None
        return Row(
            root=self.root, folder=folder, receipt=None, verdict="reported", why=error.message
        )

    def _is_asked(self, folder: Path) -> bool:
        return not self.rules.asked or folder in self.rules.asked

    def _derive(self, folder: Path) -> EvaluationReceipt | None:
        stands = history.is_standing(self.records, PolicyId.parse(folder.parent.name))
        return derive(folder, stands=stands, first_delay_s=self.rules.first_delay_s)

    def _is_final(self, receipt: EvaluationReceipt) -> bool:
        """Asked for as such, or at the update a complete run ended with."""
        end = history.current_end(self.records)
        is_last = end is not None and end.state == "complete" and end.update == receipt.update
        return receipt.request.kind == "final" or is_last

    # -- tries under way ------------------------------------------------------------------------

    def _ended(self, folder: Path, receipt: EvaluationReceipt) -> EvaluationReceipt:
        """The receipt, with a try whose job is gone marked as crashed."""
        try_ = receipt.open_try
        if try_ is None or not self._has_crashed(receipt, try_):
            return receipt
        # Exclusive: a result that came since our look stands.
        crashed = Result(time=self.clock.time(), state="skipped", reason="crashed")
        finish_try(folder, try_.number, crashed)
        return self._derive(folder) or receipt

    def _has_crashed(self, receipt: EvaluationReceipt, try_: Try) -> bool:
        if _is_session(try_.submission):
            return self._is_session_over(receipt)
        return try_.submission is not None and self.jobs.state(try_.submission.key) == "over"

    def _is_session_over(self, receipt: EvaluationReceipt) -> bool:
        newest = history.newest_epoch(self.records)
        is_later = newest is not None and newest.epoch > receipt.request.epoch
        return is_later or history.current_end(self.records) is not None

    def _open(self, folder: Path, receipt: EvaluationReceipt) -> Row:
        try_ = receipt.open_try
        assert try_ is not None
        if _is_session(try_.submission) or try_.submission is None:
            return self._row(receipt, "in_flight", "the session evaluates it")
        self.in_flight += 1
        key = try_.submission.key
        if self._is_asked(folder) and self.jobs.state(key) == "absent":
            # Claimed, and the call or its answer was lost: the same key can be asked for again.
            job = self.jobs.submit(key, self._order(folder, receipt, try_.number))
            return self._row(receipt, "submitted", "asked again under the same key", job)
        return self._row(receipt, "in_flight", receipt.state)

    # -- nothing under way ----------------------------------------------------------------------

    def _closed(self, folder: Path, receipt: EvaluationReceipt) -> Row:
        if receipt.state == "succeeded":
            return self._row(receipt, "done", "a result stands")
        if receipt.reason == "superseded":
            return self._row(receipt, "voided", "an attempt went on past it")
        if history.committed_update(self.records) < receipt.update:
            return self._row(receipt, "waits", "its commit does not stand yet")
        if receipt.request.mode == "shared" and not self._is_session_over(receipt):
            return self._row(receipt, "waits", "the session tries it")
        is_named = folder in self.rules.asked
        if receipt.state != "requested" and not is_named and (row := self._not_again(receipt)):
            return row
        if self.in_flight >= IN_FLIGHT:
            return self._row(receipt, "waits", f"{self.in_flight} are in flight")
        return self._submit(folder, receipt)

    def _not_again(self, receipt: EvaluationReceipt) -> Row | None:
        """Why an evaluation that failed or was skipped is not submitted now."""
        if not self._is_final(receipt) and not receipt.request.required:
            return self._row(receipt, "given_up", "neither final nor required")
        if self.rules.force and receipt.reason != "busy":
            return None
        if receipt.reason is not None and receipt.reason not in RESUBMITTED:
            return self._row(receipt, "reported", self._advice(receipt))
        if receipt.next_try_at is None:
            why = (
                f"{MAX_RESUBMISSIONS} resubmissions used up"
                if num_resubmissions(receipt.tries) >= MAX_RESUBMISSIONS
                else "the same failure twice"
            )
            return self._row(receipt, "given_up", f"{why}; --force tries again")
        left_s = receipt.next_try_at - self.clock.time()
        return self._row(receipt, "waits", f"{left_s:.0f} s to go") if left_s > 0 else None

    def _advice(self, receipt: EvaluationReceipt) -> str:
        if receipt.reason != "snapshot_missing":
            return str(receipt.reason)
        command = f"milepost export {self.root.path} --update {receipt.update}"
        return f"its snapshot is gone: {command}, then resubmit by hand with --force"

    def _submit(self, folder: Path, receipt: EvaluationReceipt) -> Row:
        now, number = self.clock.time(), receipt.next_try
        claim = claim_try(folder, by=self.rules.by, time=now, number=number)
        self.in_flight += 1
        if claim is None:
            return self._row(receipt, "in_flight", "another submitter was first")
        job = self.jobs.submit(claim[1].key, self._order(folder, receipt, number))
        return self._row(self._derive(folder) or receipt, "submitted", f"try {number}", job)

    def _order(self, folder: Path, receipt: EvaluationReceipt, number: int) -> JobOrder:
        return JobOrder(
            root=self.root, policy=receipt.request.policy, set_name=folder.name, number=number
        )

    def _row(
        self, receipt: EvaluationReceipt, verdict: Verdict, why: str, job: str | None = None
    ) -> Row:
        if job is None and receipt.tries and receipt.tries[-1].started is not None:
            job = receipt.tries[-1].started.flow_run
        folder = self.root.evaluation(receipt.request.policy, receipt.request.set)
        return Row(
            root=self.root, folder=folder, receipt=receipt, verdict=verdict, why=why, job=job
        )


def submit_due(root: RunRoot, jobs: Jobs, rules: Rules, *, clock: Clock) -> list[Row]:
    """One pass over the evaluations of one run: submit what is due. Idempotent, safe at once.

    Args:
        root: the run.
        jobs: where to.
        rules: how to decide.
        clock: wall time is compared with the writers' clocks, to the minute.

    Returns:
        A row per evaluation, damaged ones and those under way first; empty where another submitter
        has its turn.

    Raises:
        JobsAway: if nothing takes submissions; what was claimed is asked for again by the next.
        ChainUnreadable: if history is damaged.
    """
    if not evaluation_folders(root):
        return []
    jobs.check()
    with _turn(root) as is_ours:
        if not is_ours:
            return []
        records = Chain(root).read()
        return list(_Pass(root, records, jobs, rules, clock).rows())


@contextmanager
def _turn(root: RunRoot) -> Generator[bool]:
    """Passes over one run take turns, so that two of them count the same tries in flight.

    Claims alone keep a submission single; without the turn three could be in flight for a while.
    """
    path = root.evaluations / ".submitting"
    lease = SoftFileLease(path, lease_duration=_TURN_S, timeout=3 * _TURN_S)
    try:
        lease.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lease.release()


def _is_session(submission: Submission | None) -> bool:
    return submission is not None and submission.by == "session"
