"""The processes of a run as anybody on its host sees them, and the parts they play."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from runtime.rundir.processes import ATTEMPT_VARIABLE

_ROLES = {
    "guard": "runtime.session.guard",
    "session": "runtime.session.driver",
    "engine server": "runtime.engines.embedded.server",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
_ACTORS = {"trainer rank": "ray::_RankActor", "engine actor": "ray::EngineActor"}


def processes_of(attempts: Path) -> Iterator[psutil.Process]:
    """Every living process of a run: named by its command line or its environment.

    Args:
        attempts: the run's folder of attempts, absolute.
    """
    ours = f"{attempts}/"
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            named = any(part.startswith(ours) for part in process.cmdline())
            if named or process.environ().get(ATTEMPT_VARIABLE, "").startswith(ours):
                yield process
        except psutil.Error:
            continue


def role_of(process: psutil.Process) -> str | None:
    """The part a process plays in its run; None for helpers, and for one that is gone."""
    try:
        command: Sequence[str] = process.cmdline()
    except psutil.Error:
        return None
    if not command:
        return None
    for role, start in _ACTORS.items():
        if command[0].startswith(start):
            return role
    for role, part in _ROLES.items():
        if part in command[:4] or command[0].endswith(part):
            return role
    return None


def listening(processes: Sequence[psutil.Process]) -> set[int]:
    """TCP ports that these processes listen on."""
    ports: set[int] = set()
    for process in processes:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports
