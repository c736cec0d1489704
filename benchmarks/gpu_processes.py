"""The processes of one run, found by its output root: for benchmarks that strike or end them."""

from __future__ import annotations

from pathlib import Path

import psutil

SERVERS = ("sglang::scheduler", "runtime.engines.embedded.server")
"""What a command line shows of the process that holds an engine's weights."""


def processes(root: Path) -> list[psutil.Process]:
    """The run's guard and all that came of it; none once the guard is gone."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "runtime.session.guard" in line and f"{root}/" in line:
            found += [process, *process.children(recursive=True)]
    return found


def newest_server(root: Path) -> psutil.Process | None:
    """The youngest process with an engine's weights; None while there is none."""
    servers = [p for p in processes(root) if any(mark in _line(p) for mark in SERVERS)]
    return max(servers, key=lambda p: p.create_time(), default=None)


def end(found: list[psutil.Process], *, wait_s: float) -> int:
    """Wait for what ends by itself; kill the rest. How many were killed."""
    _, alive = psutil.wait_procs(found, timeout=wait_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=10.0)
    return len(alive)


def stop(root: Path, *, wait_s: float) -> int:
    """End a run that takes too long: its guard, which takes the rest along, and what is left."""
    found = processes(root)
    for process in found:
        if "runtime.session.guard" in _line(process):
            process.terminate()
    return end(found, wait_s=wait_s)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
