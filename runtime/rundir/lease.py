"""The lease: who may *try*. Who may *write* is decided by the chain alone.

``filelock.SoftFileLease`` keeps the marker; this module adds what the run needs on top: a live
owner is respected at once, not after a whole lease, and an owner judges its own lease by its own
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import LeaseCompromise, LeaseSettingsMismatch, SoftFileLease, Timeout

from runtime.clock import Clock, SystemClock
from runtime.errors import OwnedError
from runtime.rundir.history import newest_epoch
from runtime.rundir.layout import RunRoot
from runtime.rundir.liveness import Mark, Watch
from runtime.rundir.processes import HostBoot, is_alive
from runtime.rundir.records import Record

LOCAL_LEASE_S = 30.0
SHARED_LEASE_S = 120.0

_PATIENCE = 1.5
"""Leases that a contender waits for a marker that nobody refreshes."""


def again_s(duration_s: float) -> float:
    """Least time between the two looks that find a lease lapsed."""
    return duration_s / 12


class LeaseWatch:
    """Judges one owner's marker from the inside: the guard, and every process it owns.

    Not for contenders: they wait for a whole lease, owners leave at two thirds of it.
    """

    def __init__(
        self, path: Path, *, duration_s: float, identity: tuple[int, int], clock: Clock
    ) -> None:
        """Watch the marker that had ``identity`` (device, inode) when it was acquired."""
        self._path = path
        self._identity = identity
        self._clock = clock
        self._again_s = again_s(duration_s)
        self._age = Watch(clock, limit_s=duration_s * 2 / 3, again_s=self._again_s, is_own=True)
        self._touched: int | None = None
        self._away_since: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last successful refresh, at most."""
        return self._age.age_s

    @property
    def is_doubted(self) -> bool:
        """One look found it lost; the next decides."""
        return self._away_since is not None or self._age.is_suspect

    def lost(self) -> str | None:
        """Look once; why the lease is lost, or None while it is held as far as one can tell."""
        mark = Mark.of(self._path)
        now = self._clock.monotonic()
        # A contender may swap the marker aside for a moment and put it back: one look is no proof.
        if mark is not None and mark.identity == self._identity:
            self._away_since = None
            self._touched = mark.touched
        elif self._away_since is None:
            self._away_since = now
        elif now - self._away_since >= self._again_s:
            return "the marker is gone" if mark is None else "the marker is another owner's"
        if self._age.has_lapsed(self._touched):
            return f"the last successful refresh is {self.age_s:.1f} s old"
        return None


class RunLease:
    """The lease of one guard."""

    def __init__(
        self,
        root: RunRoot,
        *,
        duration_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare; nothing is touched yet.

        Args:
            root: the run.
            duration_s: as chain/0 has it; all contenders agree on it.
            clock: of this process.
            sleep: waits between looks.
        """
        self._path = root.lease
        self._duration_s = duration_s
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._compromise: LeaseCompromise | None = None
        self._watch: LeaseWatch | None = None
        self._lock = SoftFileLease(
            root.lease,
            lease_duration=duration_s,
            on_compromise=self._on_compromise,
            thread_local=False,
        )

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self._duration_s

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of our marker, for the processes that watch it with us.

        Raises:
            RuntimeError: if the lease is not held.
        """
        mark = Mark.of(self._path)
        if self._watch is None or mark is None:
            raise RuntimeError("the lease is not held")
        return mark.identity

    def acquire(self, records: Sequence[Record] = (), here: HostBoot | None = None) -> None:
        """Become the one who may try.

        A dead owner's lease on this host is taken at once, one that nobody refreshes after a whole
        lease by our own clock. One that is refreshed while we look is refused.

        Args:
            records: the chain, to name the owner in the refusal.
            here: this host and boot, to know a dead owner that nobody has collected (a zombie).

        Raises:
            OwnedError: if another process owns the run.
        """
        deadline = self._clock.monotonic() + _PATIENCE * self._duration_s
        abandoned = Watch(self._clock, limit_s=self._duration_s, again_s=again_s(self._duration_s))
        first: Mark | None = None
        while True:
            try:
                self._lock.acquire(blocking=False)
                break
            except Timeout:
                mark = Mark.of(self._path)
            except LeaseSettingsMismatch as error:
                raise self._owned(records, str(error)) from error
            if mark is not None:
                if self._owner_is_dead(records, here):
                    self._path.unlink(missing_ok=True)
                    continue
                first = first or mark
                if mark != first:
                    raise self._owned(records, "its lease was refreshed just now")
                # filelock keeps an empty marker for ever, for the sake of versions that wrote none.
                # Here it is a guard that was killed between creating its marker and writing it.
                if abandoned.has_lapsed(mark) and mark.size == 0:
                    self._path.unlink(missing_ok=True)
            if self._clock.monotonic() >= deadline:
                raise self._owned(records, f"waited {_PATIENCE * self._duration_s:.0f} s for it")
            self._sleep(min(0.5, self._duration_s / 30))
        mark = Mark.of(self._path)
        self._watch = LeaseWatch(
            self._path,
            duration_s=self._duration_s,
            identity=mark.identity if mark else (0, 0),
            clock=self._clock,
        )
        self._watch.lost()

    def lost(self) -> str | None:
        """Look once; why the lease is lost, or None. Judged on two looks, see LeaseWatch."""
        if self._compromise is not None:
            return f"compromised: {self._compromise.reason}"
        return self._watch.lost() if self._watch else "not held"

    def confirm(self) -> str | None:
        """As ``lost``, but a doubt is settled here and now, by waiting for the second look."""
        reason = self.lost()
        if reason is None and self._watch is not None and self._watch.is_doubted:
            time.sleep(again_s(self._duration_s))
            reason = self.lost()
        return reason

    def release(self) -> None:
        """Give the lease back; the marker goes if it is still ours. Idempotent."""
        self._watch = None
        self._lock.release()

    def _owner_is_dead(self, records: Sequence[Record], here: HostBoot | None) -> bool:
        # filelock takes a zombie for alive: in a container nobody may ever collect it.
        epoch, owner = newest_epoch(records), self._lock.owner
        if epoch is None or owner is None or owner.pid != epoch.pid:
            return False
        is_here = HostBoot(epoch.host, epoch.boot_id) == here
        return is_here and not is_alive(epoch.pid, epoch.started)

    def _on_compromise(self, compromise: LeaseCompromise) -> None:
        self._compromise = compromise

    def _owned(self, records: Sequence[Record], found: str) -> OwnedError:
        owner = self._lock.owner
        epoch = newest_epoch(records)
        parts = [f"another process owns this run ({found})"]
        if owner is not None:
            parts.append(f"pid {owner.pid} on host {owner.hostname}")
        if epoch is not None:
            age_s = max(0.0, self._clock.time() - epoch.time)
            parts.append(f"attempt {epoch.attempt}, epoch {epoch.epoch}, owner for {age_s:.0f} s")
        parts.append(
            "attach to it with `milepost watch` or end it with `milepost stop`; if its node is "
            f"lost, wait {self._duration_s:.0f} s and start again (a shared file system may still "
            "be recovering the node's lock)"
        )
        return OwnedError(
            "; ".join(parts),
            pid=owner.pid if owner else None,
            host=owner.hostname if owner else None,
            attempt=epoch.attempt if epoch else None,
        )
