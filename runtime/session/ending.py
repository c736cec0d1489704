"""The end of an epoch, as its guard writes it: record of the chain, row of the journal, view."""

from __future__ import annotations

from contextlib import suppress

from runtime import faults
from runtime.clock import Clock
from runtime.errors import DiskFull, StoreError
from runtime.rundir import history, workflow
from runtime.rundir.attempt import Outcome
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.journal import Journal
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.records import EndRecord, EpochRecord
from runtime.session.outcome import KilledBy, judge
from runtime.telemetry.events import Event


class Ending:
    """Writes how an epoch of this attempt ended: the record first, which alone counts."""

    def __init__(
        self, attempt: AttemptDir, chain: Chain, journal: Journal, *, clock: Clock
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            attempt: its folder.
            chain: of the guard that owns the epoch.
            journal: of that guard and epoch.
            clock: of this process.
        """
        self._attempt = attempt
        self._chain = chain
        self._journal = journal
        self._clock = clock

    def of_session(self, epoch: int, returncode: int, killed_by: KilledBy | None) -> Outcome:
        """Judge a session that has exited, and write its end.

        Args:
            epoch: the present one; the session may have begun it.
            returncode: of the session's process.
            killed_by: why it was killed, if we did.

        Raises:
            FencedError: if a newer owner exists; nothing was written.
        """
        records = self._chain.check(epoch)
        last = workflow.read(self._attempt.root)
        view = last if last is not None and last.epoch == epoch else None
        outcome = judge(
            self._attempt,
            epoch=epoch,
            returncode=returncode,
            killed_by=killed_by,
            committed=history.committed_update(records),
            view=view,
            now=self._clock.time(),
        )
        self._write(outcome, view)
        return outcome

    def of_unrestorable(self, epoch: EpochRecord, problem: StoreError) -> Outcome:
        """Write the end of an epoch that found nothing to restore.

        Raises:
            FencedError: if a newer owner exists; nothing was written.
        """
        outcome = Outcome(
            epoch=epoch.epoch,
            state="failed",
            ended_by="failure",
            update=max(0, epoch.restored_update),
            failure=Failure.of(problem, step="rendezvous", time=self._clock.time()),
        )
        self._write(outcome, None)
        return outcome

    def _write(self, outcome: Outcome, last: workflow.Workflow | None) -> None:
        if outcome.state == "failed" and outcome.failure is not None:
            self._journal.fail(outcome.failure)
        self._append(outcome)
        if faults.plan is not None:
            faults.plan.reach("guard.finish")
        self._journal.append(_event(outcome), ended_by=outcome.ended_by, update=outcome.update)
        root, now = self._attempt.root, self._clock.time()
        view = workflow.rebuild(root, self._chain.seen, now=now, last=last)
        show(root, view, epoch=outcome.epoch, clock=self._clock)

    def _append(self, outcome: Outcome) -> None:
        if faults.plan is not None:
            faults.plan.reach("guard.end")
        fields = outcome.model_dump(exclude={"schema_version"})
        record = EndRecord.model_validate({**fields, "time": self._clock.time()})
        try:
            self._chain.append(record)
        except DiskFull:
            # The reserve is for exactly this; a second refusal is one the next owner will find.
            self._attempt.reserve.unlink(missing_ok=True)
            self._chain.append(record)


def show(root: RunRoot, view: workflow.Workflow, *, epoch: int, clock: Clock) -> None:
    """Write the view of a run, if there is room for it.

    It can be rebuilt: no want of space for it ends a run.
    """
    with suppress(DiskFull):
        workflow.WorkflowFile(root, epoch=epoch, clock=clock).write(view)


def _event(outcome: Outcome) -> Event:
    if outcome.state == "complete":
        return Event.RUN_COMPLETED
    if outcome.state == "failed":
        return Event.ATTEMPT_ENDED
    return Event.RUN_PARKED if outcome.activity == "parked" else Event.RUN_STOPPED
