"""Asking a session to end, and waiting until it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.clock import Clock, SystemClock
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.claims import pending
from runtime.rundir.control import Control, StopMode, epoch_to_stop
from runtime.rundir.layout import RunRoot
from runtime.rundir.presence import Presence
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import EndRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """What came of asking."""

    how: Literal["asked", "next", "over", "nothing"]
    """``next``: nobody runs, and the next epoch will end as asked; ``over``: it ended before;
    ``nothing``: there is no run."""
    epoch: int
    """The owner that is meant; 0 where nobody is."""


def ask_to_stop(
    root: RunRoot, mode: StopMode, *, by: str, here: HostBoot | None = None, time_s: float
) -> StopAsked:
    """Ask the present owner to end. Idempotent; a run that is not running is left as it is.

    ``final`` is also kept for the next epoch of a run that stands still, since only a session can
    make what an end owes.

    Args:
        root: the run.
        mode: how it is to end.
        by: who asks, for the record.
        here: this host and boot.
        time_s: seconds since the Unix epoch.
    """
    records = Chain(root).read()
    waiting = pending(root, records, here or HostBoot.here())
    is_starting = waiting is not None and not waiting.is_over
    newest = history.newest_epoch(records)
    if newest is None and waiting is None:
        return StopAsked(how="nothing", epoch=0)
    is_running = is_starting or (newest is not None and history.current_end(records) is None)
    if history.is_complete(records) or not (is_running or mode == "final"):
        return StopAsked(how="over", epoch=0)
    epoch = epoch_to_stop(records)
    Control(root).request_stop(mode, epoch=epoch, by=by, time=time_s)
    return StopAsked(how="asked" if is_running else "next", epoch=epoch)


def wait_ended(
    root: RunRoot,
    epoch: int,
    *,
    deadline_s: float,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
    poll_s: float = 0.2,
) -> EndRecord | None:
    """Wait until an epoch has its end record.

    Returns:
        The record; None where the owner vanished without one, or the deadline passed.
    """
    clock = clock or SystemClock()
    chain, here = Chain(root), HostBoot.here()
    presence = Presence(root, clock=clock, here=here)
    until = clock.monotonic() + deadline_s
    while True:
        records = chain.read()
        for record in reversed(records):
            if isinstance(record, EndRecord) and record.epoch >= epoch:
                return record
        newest = history.newest_epoch(records)
        if newest is not None and newest.epoch >= epoch:
            is_gone = presence.gone(records) is not None
        else:
            waiting = pending(root, records, here)
            is_gone = waiting is None or waiting.is_over
        if is_gone and chain.read() == records:
            return None
        if clock.monotonic() >= until:
            return None
        sleep(poll_s)
