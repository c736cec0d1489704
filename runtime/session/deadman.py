"""The dead-man's switch: every process of an attempt leaves when its guard is gone.

The guard holds the only writing end of a FIFO, so its death, however sudden, is an end of file to
all who watch. A guard that is frozen, or on another host, is judged by its lease.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.clock import Clock, SystemClock
from runtime.errors import StoreError
from runtime.rundir.attempt import GuardFile
from runtime.rundir.enter import own_epoch
from runtime.rundir.layout import AttemptDir
from runtime.rundir.lease import LeaseWatch, again_s
from runtime.rundir.processes import HostBoot, kill_children

EXIT_GUARD_GONE = 75
"""Exit status of a process that its dead-man's switch ended."""

_PARTING_S = 5.0
_YOUNG_S = 300.0
_PREFIX = "mp-"
_FIFO = "guard"


class Switch:
    """The guard's side: a FIFO that reads as "alive" for as long as this process lives."""

    def __init__(self) -> None:
        _sweep_dead()
        # In the temporary folder: an output root may lie on a file system without FIFOs.
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.path = self._folder / _FIFO
        os.mkfifo(self.path, 0o600)
        # Opened for both, or opening would wait for a reader; not inherited across exec.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go: every watcher leaves. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sweep(attempt: AttemptDir) -> None:
    """Remove the switch of a guard of this host that could not remove it itself. Idempotent.

    Args:
        attempt: of an epoch that is over; its processes have been reaped.
    """
    try:
        guard = GuardFile.read(attempt)
    except StoreError:
        return  # it never announced itself, so it left nothing
    folder = Path(guard.fifo).parent
    is_here = HostBoot(guard.host, guard.boot_id) == HostBoot.here()
    if is_here and folder.name.startswith(_PREFIX) and Path(guard.fifo).name == _FIFO:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep_dead() -> None:
    """Remove switches of guards that died before anybody could learn of them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # A young one may belong to a guard that is just about to open it.
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            fd = os.open(folder / _FIFO, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                is_dead = _is_at_end(fd)
            finally:
                os.close(fd)
            if is_dead:
                shutil.rmtree(folder)


def watch(
    attempt_dir: Path | str,
    *,
    epoch: int | None = None,
    on_lost: Callable[[], None] = kill_children,
    leave: Callable[[int], None] = os._exit,
    clock: Clock | None = None,
) -> threading.Thread:
    """Tie this process to its guard: a daemon thread ends it when the guard is gone.

    Call it first thing, before threads, engines or Ray. Every process of an attempt calls it, on
    every host: where the guard is on another one, the lease alone is watched.

    Args:
        attempt_dir: the attempt's folder.
        epoch: the epoch this process belongs to; None reads it from the environment, and without
            that takes the guard's present one.
        on_lost: run first, at most 5 s; ends what this process started.
        leave: ends this process.
        clock: of this process.

    Returns:
        The thread, already running; already at work on leaving if the guard is gone.
    """
    guard = GuardFile.read(AttemptDir(Path(attempt_dir)))
    if epoch is None:
        epoch = own_epoch() or guard.epoch
    watcher = _Watcher(guard, epoch, on_lost, leave, clock or SystemClock())
    thread = threading.Thread(target=watcher.run, name="deadman", daemon=True)
    thread.start()
    return thread


class _Watcher:
    def __init__(
        self,
        guard: GuardFile,
        epoch: int,
        on_lost: Callable[[], None],
        leave: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._guard = guard
        self._epoch = epoch
        self._on_lost = on_lost
        self._leave = leave
        self._lease = LeaseWatch(
            Path(guard.lease),
            duration_s=guard.lease_s,
            identity=(guard.lease_device, guard.lease_inode),
            clock=clock,
        )

    def run(self) -> None:
        reason = self._wait()
        sys.stderr.write(f"milepost: this process leaves with its children: {reason}\n")
        # Whatever the parting does or fails to do, this process is gone after it.
        threading.Timer(_PARTING_S, self._leave, (EXIT_GUARD_GONE,)).start()
        try:
            self._on_lost()
        finally:
            self._leave(EXIT_GUARD_GONE)

    def _wait(self) -> str:
        if self._epoch != self._guard.epoch:
            return f"epoch {self._epoch} is over, the guard is at {self._guard.epoch}"
        poller = select.poll()
        is_here = HostBoot(self._guard.host, self._guard.boot_id) == HostBoot.here()
        if is_here:
            try:
                # Without a writer this opens all the same, and the first poll reads as hung up.
                fd = os.open(self._guard.fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return "the guard's switch is gone"
            if _is_at_end(fd):
                return "the guard is gone"
            poller.register(fd, select.POLLIN)
        while True:
            if poller.poll(again_s(self._guard.lease_s) * 1000):
                return "the guard is gone"
            if reason := self._lease.lost():
                return f"the lease is lost: {reason}"


def _is_at_end(fd: int) -> bool:
    """A FIFO opened after its last writer left polls as empty, but reads as ended."""
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False
