"""Claims: of several who want to launch an attempt, one wins, and the others learn who."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import StoreError
from runtime.rundir import atomic, enter
from runtime.rundir.attempt import Claim, Started
from runtime.rundir.history import newest_epoch
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.processes import HostBoot, is_alive
from runtime.rundir.records import Record

LOCAL = "local"
STARTED_WITHIN_S = 900.0
"""A local launcher writes its guard down at once. One on another host that has not after so long,
by the clocks of both, is gone; the lease decides should it come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An attempt that is claimed and has not owned the run yet."""

    attempt: AttemptDir
    claim: Claim
    is_over: bool
    """Its launcher or guard is known to be gone; of a scheduler's job only where its guard said so
    itself, on being turned away."""


def make_claim(*, launcher: str, spec_digest: str, training_digest: str, time: float) -> Claim:
    """A claim by this process."""
    return Claim(
        launcher=launcher,
        host=socket.gethostname(),
        boot_id=enter.boot_id(),
        pid=os.getpid(),
        started=enter.started(os.getpid()) or 0.0,
        spec_digest=spec_digest,
        training_digest=training_digest,
        time=time,
        nonce=secrets.token_hex(8),
    )


def claim_attempt(attempt: AttemptDir, claim: Claim) -> Claim:
    """Claim an attempt by exclusive creation; nothing else is written before winning.

    Returns:
        The claim that stands: ours, or the winner's.

    Raises:
        DiskFull: if there was no space.
        StoreError: if the winner's claim cannot be read.
    """
    attempt.path.mkdir(parents=True, exist_ok=True)
    try:
        atomic.write_new(attempt.claim, claim.encode())
    except FileExistsError:
        return read_claim(attempt)
    return claim


def read_claim(attempt: AttemptDir) -> Claim:
    """The claim of an attempt.

    Raises:
        StoreError: if there is none, or it cannot be read.
    """
    return Claim.decode(atomic.read_bytes(attempt.claim), attempt.claim)


def find_claim(attempt: AttemptDir) -> Claim | None:
    """The claim of an attempt; None where there is none, or it cannot be read."""
    try:
        return read_claim(attempt)
    except StoreError:
        return None


def newest_claimed(root: RunRoot) -> AttemptDir | None:
    """The newest attempt with a claim; a folder alone is none."""
    for number in reversed(root.attempt_numbers()):
        attempt = root.attempt(number)
        if attempt.claim.exists():
            return attempt
    return None


def pending(root: RunRoot, records: Sequence[Record], here: HostBoot) -> Pending | None:
    """The newest claimed attempt, if it is newer than every attempt that owned the run."""
    return pending_of(newest_claimed(root), records, here)


def pending_of(
    newest: AttemptDir | None, records: Sequence[Record], here: HostBoot
) -> Pending | None:
    """The same for who has looked for the newest claim already, and must not look again."""
    epoch = newest_epoch(records)
    if newest is None or (epoch is not None and newest.number <= epoch.attempt):
        return None
    claim = find_claim(newest)
    if claim is None:
        return None
    return Pending(attempt=newest, claim=claim, is_over=_is_over(newest, claim, here))


def _is_over(attempt: AttemptDir, claim: Claim, here: HostBoot) -> bool:
    if attempt.turned_away.exists():
        return True
    where = HostBoot(claim.host, claim.boot_id)
    if claim.launcher == LOCAL and here.has_restarted_since(where):
        return True
    if claim.launcher != LOCAL:
        return False
    data = atomic.read_bytes(attempt.started)
    if where != here:
        return data is None and time.time() - claim.time > STARTED_WITHIN_S
    if data is None:
        return not is_alive(claim.pid, claim.started)
    guard = Started.decode(data, attempt.started)
    return guard.started is None or not is_alive(guard.pid, guard.started)
