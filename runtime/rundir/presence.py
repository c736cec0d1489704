"""Whether the owner of a run is still there, as seen from outside."""

from __future__ import annotations

from runtime.clock import Clock
from runtime.rundir.chain import lease_duration
from runtime.rundir.history import newest_epoch
from runtime.rundir.layout import RunRoot
from runtime.rundir.lease import again_s
from runtime.rundir.liveness import Mark, Watch
from runtime.rundir.processes import HostBoot, is_alive
from runtime.rundir.records import Record


class Presence:
    """Looks at one run's owner again and again; a single look proves nothing about another host.

    On the owner's own host a dead guard is a fact. Elsewhere the lease decides, by whether its
    marker changes between looks of ours.
    """

    def __init__(self, root: RunRoot, *, clock: Clock, here: HostBoot) -> None:
        self._root = root
        self._clock = clock
        self._here = here
        self._watch: Watch | None = None

    def gone(self, records: tuple[Record, ...]) -> str | None:
        """Look once; why the newest epoch's owner is gone, or None while it may be there."""
        epoch = newest_epoch(records)
        if epoch is None:
            return None
        where = HostBoot(epoch.host, epoch.boot_id)
        owner = f"the guard of attempt {epoch.attempt} (pid {epoch.pid} on {epoch.host})"
        if where == self._here and not is_alive(epoch.pid, epoch.started):
            return f"{owner} is gone"
        if self._here.has_restarted_since(where):
            return f"{owner} ended with a restart of its host"
        watch = self._watch or self._start(records)
        if watch.has_lapsed((epoch.epoch, Mark.of(self._root.lease))):
            return f"{owner} has not refreshed its lease for {watch.age_s:.0f} s"
        return None

    def _start(self, records: tuple[Record, ...]) -> Watch:
        duration_s = lease_duration(records) or 0.0
        self._watch = Watch(self._clock, limit_s=duration_s, again_s=again_s(duration_s))
        return self._watch
