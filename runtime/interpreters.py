"""Other interpreters than this one: the environment they are run in, and what they answer."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_OURS = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Would have another interpreter look for its packages in our environment."""
_POLL_S = 0.1


def environment_of_another(
    environ: Mapping[str, str] = os.environ, *, first: Sequence[Path] = ()
) -> dict[str, str]:
    """Our environment for an interpreter of another one.

    Args:
        environ: of this process.
        first: folders it looks for modules in before those of our ``PYTHONPATH``.
    """
    env = {name: value for name, value in environ.items() if name not in _OURS}
    theirs = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*map(str, first), *theirs]))
    return env


def answer(
    command: Sequence[str], *, within_s: float, cancelled: threading.Event | None = None
) -> str:
    """Run a program of another environment to its end; returns what it wrote to standard output.

    It runs in ``/``, and an interpreter there takes no module from the folder it is started in.
    Nothing of it is left afterwards.

    Args:
        command: program and arguments.
        within_s: limit (seconds).
        cancelled: set from another thread: it is not waited for any longer.

    Raises:
        OSError: if it cannot be run.
        subprocess.SubprocessError: if it fails, or does not answer in time or before ``cancelled``.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # What -P says, in words that an older interpreter passes over.
        env=environment_of_another() | {"PYTHONSAFEPATH": "1"}, cwd="/", start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + within_s
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                said, complained = process.communicate(timeout=_POLL_S)
                break
            if cancelled is not None and cancelled.is_set():
                raise subprocess.SubprocessError(f"{command[0]} is not waited for: cancelled")
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(list(command), within_s)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), said, complained)
    return said.decode(errors="replace")
