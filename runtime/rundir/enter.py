"""Enter this process in the registry, then become another program.

Run as a script before the exec of every process of an attempt, so that a process is in the registry
before it does anything. It imports the standard library only and starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

EPOCH_VARIABLE = "MILEPOST_EPOCH"
"""Set for the session and thereby for its descendants: the epoch they belong to."""

_STATE, _STARTTIME = 0, 19
"""Fields of /proc/<pid>/stat after the name."""


def boot_id() -> str:
    """Names the space in which a pid means something: this boot of the kernel, this pid namespace.

    Two containers of one host may share its name and its boot, but not their pids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        import psutil

        return f"boot-{psutil.boot_time():.0f}"


def started(pid: int) -> float | None:
    """Start of a process in seconds since boot; None when it is gone or a zombie.

    On Linux it counts in the kernel's own ticks, which no clock adjustment moves.
    """
    if not Path("/proc/self/stat").exists():
        import psutil

        try:
            process = psutil.Process(pid)
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return None if is_zombie else process.create_time()
        except psutil.NoSuchProcess:
            return None
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold spaces and parentheses: count from its last one.
    fields = line.rpartition(")")[2].split()
    if fields[_STATE] in ("Z", "X"):
        return None
    return int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")


def own_epoch() -> int:
    """The epoch this process belongs to; 0 where none was said."""
    return int(os.environ.get(EPOCH_VARIABLE, "0"))


def row(role: str, pid: int, epoch: int) -> bytes:
    """The registry's row for a live process of this host."""
    fields = {
        "epoch": epoch,
        "pid": pid,
        "started": started(pid),
        "boot_id": boot_id(),
        "host": socket.gethostname(),
        "role": role,
        "time": time.time(),
    }
    return json.dumps(fields).encode() + b"\n"


def enter(registry: str, role: str, pid: int, epoch: int) -> None:
    """Append the row of a process in one write."""
    fd = os.open(registry, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, row(role, pid, epoch))
    finally:
        os.close(fd)


if __name__ == "__main__":
    enter(sys.argv[1], sys.argv[2], os.getpid(), own_epoch())
    os.execvp(sys.argv[3], sys.argv[3:])
