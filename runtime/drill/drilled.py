"""One run under a drill: attended, with its fault plan, and watched for as long as it moves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from runtime.drill.job import Job
from runtime.drill.observing import Observer
from runtime.drill.processes import processes_of
from runtime.errors import WaitTimeout
from runtime.faults.plan import VARIABLE, Fault, FaultPlan, Kind
from runtime.rundir import history, workflow
from runtime.rundir.records import EndRecord

_POLL_S = 0.05
IDLE_S = 300.0
"""A run in which nothing moved for so long is hung, however busy the machine is."""
_HOPELESS = 30
"""Epochs without a commit between them after which no further one is waited for."""
_LEAVING_S = 20.0


class DrilledRun:
    """One run with its attendants, its fault plan, and eyes on it. A context manager."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan = FaultPlan(job.file.parent / "faults")
        self.observer = Observer(job)
        self.ports: set[int] = set()
        self._attendant: subprocess.Popen[bytes] | None = None
        self._second: subprocess.Popen[bytes] | None = None
        self._num_faults = 0
        self._moved = (0, 0)
        self._moved_at = time.monotonic()

    def __enter__(self) -> DrilledRun:
        self.disarm()
        self._attendant = self._attend()
        return self

    def __exit__(self, *_: object) -> None:
        self.attend_once()
        if self._attendant is not None:
            self._attendant.kill()
            self._attendant.wait()
        # Again and again: one of them may have started another just now.
        until = time.monotonic() + _LEAVING_S
        while left := list(processes_of(self.job.root.attempts)):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
            if time.monotonic() >= until:
                break

    # -- attending --------------------------------------------------------------------------------

    @property
    def attendant(self) -> int:
        """Process id of who attends to it."""
        assert self._attendant is not None
        return self._attendant.pid

    def attend_twice(self) -> int:
        """Let a second attendant do the same beside the first; its process id. Idempotent."""
        if self._second is None or self._second.poll() is not None:
            self._second = self._attend()
        return self._second.pid

    def attend_once(self) -> None:
        """End the second attendant, if there is one."""
        if self._second is not None:
            self._second.kill()
            self._second.wait()
            self._second = None

    def _attend(self) -> subprocess.Popen[bytes]:
        with self.job.file.with_name("attendant.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "runtime.drill.attendant", str(self.job.file)],
                env={**os.environ, VARIABLE: str(self.job.file.parent / "faults")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # -- its fault plan --------------------------------------------------------------------------

    def arm(
        self,
        point: str,
        kind: Kind,
        *,
        after: int = 0,
        times: int = 1,
        seconds: float | None = None,
    ) -> Fault:
        """Make one fault its plan, instead of what was armed before."""
        self._num_faults += 1
        fault = Fault(
            id=f"blow-{self._num_faults}",
            point=point,
            kind=kind,
            after=after,
            times=times,
            seconds=seconds,
        )
        self.plan.arm([fault])
        return fault

    def disarm(self) -> None:
        """Let everything pass from now on."""
        self.plan.arm(())

    # -- waiting ----------------------------------------------------------------------------------

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something, attended, for as long as anything moves.

        Raises:
            WaitTimeout: if nothing did, or if epoch after epoch came to no commit.
        """
        while not self._look(is_so):
            restarts = history.restarts_since_commit(self.observer.records)
            if restarts > _HOPELESS:
                raise WaitTimeout(
                    f"waited for {what} in {self.job.file.parent}, and {restarts} epochs came to "
                    f"no commit: {self._last_words()}"
                )
            if time.monotonic() - self._moved_at > IDLE_S:
                raise WaitTimeout(
                    f"waited for {what} in {self.job.file.parent}, and nothing moved for "
                    f"{IDLE_S:.0f} s"
                )
            time.sleep(_POLL_S)

    def wait(self, seconds: float) -> None:
        """Let it run so long, or to its end."""
        until = time.monotonic() + seconds
        self.until(
            lambda: time.monotonic() >= until or self.observer.is_complete(), "the next blow"
        )

    def _look(self, is_so: Callable[[], bool]) -> bool:
        if self._attendant is None or self._attendant.poll() is not None:
            if self.observer.is_complete():
                return is_so()
            self._attendant = self._attend()
        self.observer.look()
        view = workflow.read(self.job.root) if self.job.root.workflow.exists() else None
        moved = (len(self.observer.seen), view.update if view else 0)
        if moved != self._moved:
            self._moved, self._moved_at = moved, time.monotonic()
        return is_so()

    def _last_words(self) -> str:
        ends = (r for r in reversed(self.observer.records) if isinstance(r, EndRecord))
        return next((e.failure.message for e in ends if e.failure), "none of them said why")
