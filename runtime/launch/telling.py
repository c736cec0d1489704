"""What became of an attempt: the run directory's word, and the scheduler's for what it cannot say.

A scheduler knows that a process left and with which status. Whether the run is complete stands in
the end record alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.errors import RetryBy
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.rundir import history
from runtime.rundir.attempt import EXIT_NOT_OWNER, EXIT_STOPPED, EXIT_TERMINATED
from runtime.rundir.records import EndRecord, EpochRecord, Record
from runtime.session.ends import EndedBy

_SILENT = (AttemptClass.SUCCEEDED, AttemptClass.FAILED, AttemptClass.STOPPED)
"""Classes that tell of a process's end alone; with any other the scheduler knows why."""


def told(
    standing: AttemptStanding, records: Sequence[Record] | None, attempt: int
) -> AttemptStanding:
    """What the scheduler says, and what history knows of it: the class that counts.

    No attempt has succeeded without a complete run. Where history cannot be read, the guard's exit
    status speaks for it: only a complete run's is 0.

    Args:
        standing: the scheduler's.
        records: the chain; None where it cannot be read from here.
        attempt: the attempt's number.
    """
    if not standing.kind.is_over:
        return standing
    end = end_of(records or (), attempt)
    if end is not None:
        return with_end(standing, end)
    if standing.kind is AttemptClass.SUCCEEDED:
        return _left_in_order(standing, records)
    if standing.kind not in _SILENT:
        return standing
    if standing.exit_code == EXIT_NOT_OWNER:
        return _not_owner(standing, records or (), attempt)
    return _by_exit_status(standing)


def with_end(standing: AttemptStanding, end: EndRecord) -> AttemptStanding:
    """The class of an attempt that wrote its end: it knows why, the scheduler only that it did.

    Args:
        standing: the scheduler's.
        end: the attempt's own end record.
    """
    if not standing.kind.is_over:
        return standing
    if end.state == "complete":
        return replace(standing, kind=AttemptClass.SUCCEEDED, reason="")
    failure = end.failure
    was_asked = failure is None and end.state != "failed" and end.ended_by != EndedBy.SIGTERM
    if was_asked:
        # Whatever took the rest of it away afterwards: nobody is to go on from there unasked.
        activity = end.activity or "stopped"
        reason = f"{activity} at update {end.update}, ended by {end.ended_by}"
        return replace(standing, kind=AttemptClass.CANCELED, reason=reason, activity=activity)
    if standing.kind not in _SILENT:
        return standing
    if failure is not None and failure.retry is RetryBy.LAUNCH:
        is_preempted = failure.error_class == "Preempted"
        kind = AttemptClass.PREEMPTED if is_preempted else AttemptClass.INTERRUPTED
        return replace(standing, kind=kind, reason=failure.message)
    if failure is not None or end.state == "failed":
        reason = failure.message if failure is not None else f"ended by {end.ended_by}"
        return replace(standing, kind=AttemptClass.FAILED, reason=reason)
    return _terminated(standing, f" at update {end.update}")


def end_of(records: Sequence[Record], attempt: int) -> EndRecord | None:
    """The end record of an attempt's last epoch; None where it has none."""
    epochs = (r for r in reversed(records) if isinstance(r, EpochRecord) and r.attempt == attempt)
    last = next(epochs, None)
    ends = (r for r in records if isinstance(r, EndRecord) and last and r.epoch == last.epoch)
    return next(ends, None)


def named(epoch: EpochRecord) -> str:
    """The owner of an epoch, for people."""
    return f"attempt {epoch.attempt} (epoch {epoch.epoch}, pid {epoch.pid} on {epoch.host})"


def _left_in_order(standing: AttemptStanding, records: Sequence[Record] | None) -> AttemptStanding:
    if records is None:
        reason = "by its exit status: its output root cannot be read from here"
        return replace(standing, reason=reason)
    if history.is_complete(records):  # by another attempt; this one found it so
        return replace(standing, reason="")
    return replace(
        standing,
        kind=AttemptClass.STOPPED,
        is_unconfirmed=True,
        reason="its process left with status 0, and the run directory has no end of it",
    )


def _by_exit_status(standing: AttemptStanding) -> AttemptStanding:
    if standing.exit_code == EXIT_TERMINATED:
        return _terminated(standing)
    if standing.exit_code == EXIT_STOPPED:
        reason = "stopped or parked, as was asked"
        return replace(standing, kind=AttemptClass.CANCELED, reason=reason, activity="stopped")
    return standing


def _terminated(standing: AttemptStanding, where: str = "") -> AttemptStanding:
    """By whoever ends processes from outside, and said no more about it than that."""
    return replace(standing, kind=AttemptClass.INTERRUPTED, reason=f"ended by SIGTERM{where}")


def _not_owner(
    standing: AttemptStanding, records: Sequence[Record], attempt: int
) -> AttemptStanding:
    """A guard left that did not own the run: the training did not fail.

    Another process has it, or this attempt lost its lease and nobody has taken it over yet.
    """
    epoch = history.newest_epoch(records)
    if epoch is not None and epoch.attempt == attempt:
        reason = "it did not keep the lease of the run, its log says why; nobody has taken it over"
        return replace(standing, kind=AttemptClass.INTERRUPTED, reason=reason)
    owner = f": {named(epoch)}" if epoch is not None else "; its log names it"
    return replace(
        standing,
        kind=AttemptClass.STOPPED,
        is_turned_away=True,
        reason=f"another process owned the run{owner}",
    )
