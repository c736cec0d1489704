"""How a session ended: its own last words, or what its exit status says for it."""

from __future__ import annotations

import signal
from typing import Literal

from runtime.errors import SessionLost, StoreError
from runtime.rundir import atomic
from runtime.rundir.attempt import Outcome
from runtime.rundir.failure import Failure
from runtime.rundir.layout import AttemptDir
from runtime.rundir.workflow import Workflow

KilledBy = Literal["sigterm", "stop_now"]
"""Why the guard itself ended the session: the grace ran out, or somebody asked."""


def judge(
    attempt: AttemptDir,
    *,
    epoch: int,
    returncode: int,
    killed_by: KilledBy | None,
    committed: int,
    view: Workflow | None,
    now: float,
) -> Outcome:
    """Decide how the session of an epoch ended.

    Last words count with exit status 0; a failure counts with any. A run is complete only if its
    session also left in good order: a crash after the last word is a failure, and the next epoch
    finds everything committed.

    Args:
        attempt: its folder.
        epoch: last words of another epoch do not count.
        returncode: of the session; negative for a signal.
        killed_by: set if the guard ended it; that is no failure.
        committed: newest committed update, or -1.
        view: the session's last workflow view, if it belongs to this epoch.
        now: seconds since the Unix epoch.
    """
    words = _last_words(attempt, epoch)
    if words is not None and (returncode == 0 or words.failure is not None):
        return words
    reached = max(0, committed, view.update if view else 0, words.update if words else 0)
    if killed_by is not None:
        return Outcome(
            epoch=epoch,
            state="training",
            activity="stopped",
            ended_by=killed_by,
            update=reached,
        )
    error = SessionLost(
        f"the session of epoch {epoch} {_how(returncode, words)}",
        returncode=returncode,
        log=str(attempt.session_log),
    )
    failure = Failure.of(
        error,
        step=view.step if view and view.step else "rendezvous",
        time=now,
        kind="death" if returncode < 0 else "exception",
    )
    return Outcome(
        epoch=epoch, state="failed", ended_by="session_lost", update=reached, failure=failure
    )


def _last_words(attempt: AttemptDir, epoch: int) -> Outcome | None:
    try:
        words = Outcome.decode(atomic.read_bytes(attempt.outcome), attempt.outcome)
    except StoreError:
        return None
    return words if words.epoch == epoch else None


def _how(returncode: int, words: Outcome | None) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        # SIGKILL that nobody of us sent is what the kernel does when memory runs out.
        hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
        how = f"was ended by {name}{hint}"
    else:
        how = f"exited with status {returncode}"
    return how + (f" after it said {words.state}" if words else " without last words")
