"""A server and everything it started: who is left of it, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the group."""

    pid: int
    start: int
    """Clock ticks since boot, so that a later process with the same id is not taken for it."""
    title: str
    """First word of its command line, as far as it says anything."""
    is_zombie: bool


def members(pgid: int) -> list[Member]:
    """Every process of a group, zombies too."""
    return [found for found in _all(pgid) if found is not None]


def is_left(member: Member) -> bool:
    """That very process still runs; a zombie does not."""
    found = _member(_PROC / str(member.pid))
    return found is not None and found[1].start == member.start and not found[1].is_zombie


def end_group(process: subprocess.Popen[bytes], *, grace_s: float, gone_s: float = 10.0) -> bool:
    """End a group whose leader we started: SIGTERM to the leader, SIGKILL to all after a grace.

    Args:
        process: the leader, which started its own session.
        grace_s: how long the leader may take to leave by itself; 0: none.
        gone_s: how long the kernel may take to clear a killed process away (GPU contexts take
            seconds).

    Returns:
        Whether nothing of the group is left.
    """
    if grace_s > 0 and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    deadline = time.monotonic() + gone_s
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        # Children of a killed leader are reaped by init, so a zombie among them is gone for us.
        if process.poll() is not None and all(m.is_zombie for m in members(process.pid)):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)


def _all(pgid: int) -> Iterator[Member | None]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            found = _member(folder)
            yield found[1] if found is not None and found[0] == pgid else None


def _member(folder: Path) -> tuple[int, Member] | None:
    try:
        # After the name, which may hold anything and ends with the last parenthesis.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        title = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, pgrp, start = fields[0], int(fields[2]), int(fields[19])
    member = Member(pid=int(folder.name), start=start, title=title, is_zombie=state in "ZX")
    return pgrp, member
