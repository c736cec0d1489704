"""Chains of runs that somebody on another host owns."""

from __future__ import annotations

import os

from runtime.clock import Clock
from runtime.errors import RunError
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord, EpochRecord

LEASE_S = 30.0


def own(root: RunRoot, *, attempt: int, epoch: int = 1) -> None:
    """Let an attempt own the run from now on, its guard with pid 7 on a host called elsewhere."""
    root.create()
    chain = Chain(root)
    chain.read()
    chain.append(
        EpochRecord(
            epoch=epoch,
            time=0.0,
            attempt=attempt,
            host="elsewhere",
            pid=7,
            boot_id="its-boot",
            started=1.0,
            reason="test",
            restored=None,
            restored_seq=None,
            lease_s=LEASE_S if epoch == 1 else None,
        )
    )
    root.lease.touch()


def refresh(root: RunRoot, clock: Clock) -> None:
    """As the owner does while it lives."""
    os.utime(root.lease, ns=(0, int(clock.time() * 1e9)))


def end(root: RunRoot, record: EndRecord) -> None:
    """Write the owner's last words."""
    chain = Chain(root)
    chain.read()
    chain.append(record)


def ended(state: str, by: str, error: RunError | None = None, *, epoch: int = 1) -> EndRecord:
    """An end record: ``complete``, ``failed``, or (``training``) stopped by somebody."""
    failure = Failure.of(error, step="segment/5", time=0.0) if error else None
    activity = "stopped" if state == "training" else None
    return EndRecord(
        epoch=epoch, time=0.0, state=state, activity=activity, ended_by=by, update=3,
        failure=failure,
    )  # fmt: skip
