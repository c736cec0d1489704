"""The session as the guard's child: started in a group of its own, ended as a whole tree."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.rundir.processes import ProcessRegistry, kill_children


class SessionProcess:
    """One session, from start to exit."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        registry: ProcessRegistry,
        log: Path,
    ) -> None:
        """Start it: entered in the registry before its exec, output appended to ``log``."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                registry.command("session", argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the session; the registry's shim keeps it."""
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status (negative: a signal), or None if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Pass SIGTERM to the session alone: it knows what its children need."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL the session, the group we made for it, and all its descendants."""
        kill_children(self.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
