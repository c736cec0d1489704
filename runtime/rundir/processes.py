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
    """One boot of one host: within it pid and start time name a process."""

    host: str
    boot_id: str

    @classmethod
    def here(cls) -> HostBoot:
        """This host and its present boot."""
        return cls(socket.gethostname(), enter.boot_id())


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

    def enter(self, role: str, pid: int | None = None) -> None:
        """Enter a process that somebody else started (a Ray actor enters itself)."""
        enter.enter(str(self._path), role, os.getpid() if pid is None else pid)

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
    attempts: Iterable[int] | None = None,
    keep: Iterable[int] = (),
    deadline_s: float = 10.0,
) -> Reaped:
    """Kill what is left on this host of attempts of this run.

    Victims are the live processes of the registries, their descendants, and any process whose
    environment names one of the attempts. This process, its ancestors and ``keep`` are spared.

    Args:
        root: the run.
        here: this host and boot; entries of others are left alone.
        attempts: which ones; None means all.
        keep: pids to spare.
        deadline_s: how long to wait for the killed ones to be gone.
    """
    numbers = root.attempt_numbers() if attempts is None else sorted(attempts)
    spared = {os.getpid(), *keep, *(p.pid for p in psutil.Process().parents())}
    victims: dict[int, tuple[float, str]] = {}
    for number in numbers:
        for entry in ProcessRegistry(root.attempt(number).processes).entries():
            if entry.where == here and entry.started is not None:
                victims |= _with_descendants(entry.pid, entry.started, entry.role)
    if here == HostBoot.here():
        victims |= _by_environment({str(root.attempt(n).path) for n in numbers})
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


def kill_children(pid: int | None = None) -> None:
    """SIGKILL every descendant of a process (default: this one), pid by pid."""
    parent = os.getpid() if pid is None else pid
    for child, (started, _) in _descendants(parent, "child").items():
        kill_exactly(child, started)


def attempt_environment(
    attempt_dir: Path | None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """An environment whose processes are known to belong to an attempt, or (None) to none."""
    result = dict(os.environ if environ is None else environ)
    result.pop(ATTEMPT_VARIABLE, None)
    if attempt_dir is not None:
        result[ATTEMPT_VARIABLE] = str(attempt_dir)
    return result


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


def _by_environment(folders: set[str]) -> dict[int, tuple[float, str]]:
    found: dict[int, tuple[float, str]] = {}
    for process in psutil.process_iter():
        started = enter.started(process.pid)
        try:
            folder = process.environ().get(ATTEMPT_VARIABLE)
        except (psutil.Error, OSError):
            continue
        if folder in folders and started is not None:
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
