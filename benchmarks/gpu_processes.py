"""The processes of one run, found by its output root: for benchmarks that strike or end them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL_S = 0.2
KILLED_S = 10.0
"""For the kernel to end what was killed."""
GUARD = "runtime.session.guard"
SERVERS = ("sglang::scheduler", "runtime.engines.embedded.server")
"""What a command line shows of the process that holds an engine's weights."""


class Processes:
    """A run's guard and all that came of it, those that were seen before the guard went included.

    A process is known by its number and its start, so that a number given to another is no longer
    it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Remember what runs now; below each that was seen before, too."""
        roots = self._living()
        for process in psutil.process_iter():
            line = _line(process)
            if GUARD in line and f"{self._root}/" in line:
                roots.append(process)
        for process in roots:
            self._seen |= {process, *_below(process)}

    def alive(self) -> list[psutil.Process]:
        """Those that live, of now and of every look before."""
        self.look()
        return self._living()

    def _living(self) -> list[psutil.Process]:
        self._seen = {p for p in self._seen if _lives(p)}
        return list(self._seen)

    def newest_server(self) -> psutil.Process | None:
        """The youngest process with an engine's weights; None while there is none."""
        servers = [p for p in self.alive() if any(mark in _line(p) for mark in SERVERS)]
        return max(servers, key=_started, default=None)

    def end(self, *, wait_s: float) -> int:
        """Wait for what ends by itself; kill the rest. How many were killed."""
        self.look()
        self._wait(wait_s)
        left = self.alive()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._wait(KILLED_S)
        return len(left)

    def _wait(self, limit_s: float) -> None:
        ends = time.monotonic() + limit_s
        while self._living() and time.monotonic() < ends:
            time.sleep(POLL_S)

    def stop(self, *, wait_s: float) -> int:
        """End a run that takes too long: its guard, which takes the rest along, and what is left.

        How many had to be killed.
        """
        for process in self.alive():
            if GUARD in _line(process):
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        return self.end(wait_s=wait_s)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:  # it has ended
        return []


def _started(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.Error:
        return 0.0


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
