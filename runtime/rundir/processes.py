"""Every process of an attempt, and ending those that an earlier owner left behind.

Processes are ended pid by pid, each only after its start time and boot id proved that it is the one
meant. Groups are not signalled: Ray's own processes may share one with strangers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.rundir import enter
from runtime.rundir.layout import RunRoot

ATTEMPT_VARIABLE = "MILEPOST_ATTEMPT_DIR"
"""Set for the session and thereby for all its descendants, Ray's own processes too."""


@dataclass(frozen=True, slots=True)
class HostBoot:
    """One boot and pid namespace of one host: within it pid and start time name a process."""

    host: str
    boot_id: str

    @classmethod
    def here(cls) -> HostBoot:
        """This host, its present boot and this pid namespace."""
        return cls(socket.gethostname(), enter.boot_id())

    def has_restarted_since(self, then: HostBoot) -> bool:
        """Whether this host was booted again since ``then``: every process of then is gone.

        A container of the same host and boot is neither here nor gone: its pids mean nothing to us.
        """
        boots = (self.boot_id.partition(".")[0], then.boot_id.partition(".")[0])
        return self.host == then.host and boots[0] != boots[1]


class ProcessEntry(BaseModel):
    """A row of the registry."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    started: float | None
    """Seconds since boot; None if the process was gone before it could be read."""
    boot_id: str
    host: str
    role: str
    time: float
    epoch: int = 0
    """The epoch it belongs to; 0 counts as older than any."""

    @property
    def where(self) -> HostBoot:
        """The boot in which the pid means something."""
        return HostBoot(self.host, self.boot_id)


class ProcessRegistry:
    """``attempts/<n>/processes.jsonl``: appended to by every process of the attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def command(self, role: str, argv: Sequence[str]) -> list[str]:
        """Wrap a command so that the process is entered before its exec; its pid stays the same."""
        # Isolated and without site-packages where procfs tells all: starts in 15 ms instead of 60.
        flags = ["-I", "-S"] if Path("/proc/self/stat").exists() else ["-I"]
        return [sys.executable, *flags, enter.__file__, str(self._path), role, *argv]

    def enter(self, role: str, pid: int | None = None, epoch: int | None = None) -> None:
        """Enter a process that somebody else started (a Ray actor enters itself)."""
        of = os.getpid() if pid is None else pid
        enter.enter(str(self._path), role, of, enter.own_epoch() if epoch is None else epoch)

    def entries(self) -> list[ProcessEntry]:
        """All rows in order; torn ones are left out, a missing file has none."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _entry(line)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What a reaping did."""

    killed: tuple[tuple[int, str], ...]
    """(pid, role) of each process that was sent SIGKILL."""
    remaining: tuple[tuple[int, str], ...]
    """Those still there at the deadline (uninterruptible sleep)."""


def reap(
    root: RunRoot,
    *,
    here: HostBoot,
    up_to_epoch: int,
    keep: Iterable[int] = (),
    deadline_s: float = 10.0,
) -> Reaped:
    """Kill what is left on this host of epochs of this run.

    Victims are the live processes of the registries, their descendants, and any process whose
    environment names an attempt of this run. This process, its ancestors and ``keep`` are spared,
    and whatever belongs to a later epoch, were it in the same attempt.

    Args:
        root: the run.
        here: this host and boot; entries of others are left alone.
        up_to_epoch: the newest epoch whose processes are ended.
        keep: pids to spare.
        deadline_s: how long to wait for the killed ones to be gone.
    """
    spared = {os.getpid(), *keep, *(p.pid for p in psutil.Process().parents())}
    victims: dict[int, tuple[float, str]] = {}
    for number in root.attempt_numbers():
        for entry in ProcessRegistry(root.attempt(number).processes).entries():
            is_meant = entry.epoch <= up_to_epoch and entry.pid not in spared
            if is_meant and entry.where == here and entry.started is not None:
                victims |= _with_descendants(entry.pid, entry.started, entry.role)
    if here == HostBoot.here():
        victims |= _by_environment(root, up_to_epoch)
    killed = tuple(
        (pid, role)
        for pid, (started, role) in victims.items()
        if pid not in spared and kill_exactly(pid, started)
    )
    return Reaped(killed=killed, remaining=_wait_gone(killed, victims, deadline_s))


def is_alive(pid: int, started: float) -> bool:
    """Whether the process that was ``pid`` and began at ``started`` still runs on this host."""
    return enter.started(pid) == started


def kill_exactly(pid: int, started: float, signum: int = signal.SIGKILL) -> bool:
    """Signal the process that was ``pid`` and began at ``started``, and no other.

    Returns:
        False if it is gone.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        # No pidfd here: the pid could be reused between look and signal, within microseconds.
        if not is_alive(pid, started):
            return False
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        return True
    try:
        if not is_alive(pid, started):
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


_SWEEPS = 5


def kill_children(pid: int | None = None) -> None:
    """SIGKILL every descendant of a process (default: this one), pid by pid.

    Looks again until there is none: one of them may start another while it is being listed.
    """
    parent = os.getpid() if pid is None else pid
    for _ in range(_SWEEPS):
        found = _descendants(parent, "child")
        if not found:
            return
        for child, (started, _) in found.items():
            kill_exactly(child, started)


def owned_environment(
    environ: Mapping[str, str], *, attempt_dir: Path, epoch: int
) -> dict[str, str]:
    """An environment whose processes are known to belong to an epoch of an attempt."""
    names = {ATTEMPT_VARIABLE: str(attempt_dir), enter.EPOCH_VARIABLE: str(epoch)}
    return {**environ, **names}


def free_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment whose processes belong to no attempt and are never reaped."""
    names = (ATTEMPT_VARIABLE, enter.EPOCH_VARIABLE)
    return {name: value for name, value in environ.items() if name not in names}


def _entry(line: bytes) -> ProcessEntry | None:
    try:
        return ProcessEntry.model_validate(json.loads(line))
    except (ValueError, ValidationError):
        return None


def _with_descendants(pid: int, started: float, role: str) -> dict[int, tuple[float, str]]:
    if not is_alive(pid, started):
        return {}
    return {pid: (started, role)} | _descendants(pid, f"child of {role}")


def _descendants(pid: int, role: str) -> dict[int, tuple[float, str]]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    return {c.pid: (at, role) for c in children if (at := enter.started(c.pid)) is not None}


def _by_environment(root: RunRoot, up_to_epoch: int) -> dict[int, tuple[float, str]]:
    found: dict[int, tuple[float, str]] = {}
    for process in psutil.process_iter():
        started = enter.started(process.pid)
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue
        folder = environ.get(ATTEMPT_VARIABLE)
        if folder is None or started is None or Path(folder).parent != root.attempts:
            continue
        epoch = environ.get(enter.EPOCH_VARIABLE, "0")
        if epoch.isdecimal() and int(epoch) <= up_to_epoch:
            found[process.pid] = (started, "descendant")
    return found


def _wait_gone(
    killed: Sequence[tuple[int, str]],
    victims: Mapping[int, tuple[float, str]],
    deadline_s: float,
) -> tuple[tuple[int, str], ...]:
    deadline = time.monotonic() + deadline_s
    remaining = list(killed)
    while remaining := [(p, r) for p, r in remaining if is_alive(p, victims[p][0])]:
        if time.monotonic() >= deadline:
            break
        select.select([], [], [], 0.01)
    return tuple(remaining)
