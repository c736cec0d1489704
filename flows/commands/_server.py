"""Processes of `milepost up`: a Prefect server on loopback, and a worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
START_DEADLINE_S = 180.0
"""A new database takes 20 s on an idle laptop, a busy one several times that."""
END_DEADLINE_S = 20.0


class ServerError(Exception):
    """The server or the worker is not what `milepost up` needs."""


def environment(port: int) -> dict[str, str]:
    """What every process of this server is told; the UI needs URL and port said together."""
    url = api_url(port)
    return {
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_UI_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }


def api_url(port: int) -> str:
    """URL of the API of a server on this machine."""
    return f"http://{HOST}:{port}/api"


def is_healthy(port: int) -> bool:
    """Whether a Prefect server answers on the port.

    Raises:
        ServerError: if something else does.
    """
    try:
        with urllib.request.urlopen(f"{api_url(port)}/health", timeout=5) as answer:
            if answer.read().strip() == b"true":
                return True
    except urllib.error.HTTPError as error:
        raise ServerError(f"port {port} is taken by something that is no Prefect server") from error
    except OSError:
        return False
    raise ServerError(f"port {port} is taken by something that is no Prefect server")


def log_folder() -> Path:
    """Where output of server and worker goes; made if it does not exist."""
    from prefect.settings import PREFECT_HOME

    folder = PREFECT_HOME.value() / "milepost"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Child:
    """A process that this command started and will end."""

    def __init__(
        self, name: str, arguments: list[str], env: Mapping[str, str], log: Path | None
    ) -> None:
        """Start ``python -m prefect ...``; ``log`` None leaves its output on the terminal."""
        self.name = name
        self.log = log
        file = None if log is None else log.open("ab")
        try:
            # A session of its own: Ctrl-C comes to us alone, and the worker ends before the server.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", *arguments],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=None if file is None else subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if file is not None:
                file.close()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self, deadline_s: float = END_DEADLINE_S) -> None:
        """SIGTERM, and SIGKILL at the deadline. Idempotent."""
        if self.exit_status is not None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(deadline_s)
            return
        self._process.kill()
        self._process.wait(deadline_s)


def start_server(port: int, *, is_asked_to_end: Callable[[float], bool]) -> Child:
    """Start a server and wait until it answers.

    Args:
        port: on loopback.
        is_asked_to_end: waits so many seconds at most; True ends the waiting.

    Raises:
        ServerError: if it exits, or does not answer within START_DEADLINE_S; it is ended then.
    """
    log = log_folder() / f"server-{port}.log"
    command = ["server", "start", "--host", HOST, "--port", str(port)]
    server = Child("server", command, environment(port), log)
    until = time.monotonic() + START_DEADLINE_S
    try:
        while not is_healthy(port):
            if server.exit_status is not None:
                raise ServerError(f"the server ended with {server.exit_status}: see {log}")
            if time.monotonic() >= until or is_asked_to_end(0.3):
                raise ServerError(f"the server did not answer on {api_url(port)}: see {log}")
    except BaseException:
        server.end()
        raise
    return server


def start_worker(port: int, pool: str) -> Child:
    """Start a process worker of ``pool``."""
    command = ["worker", "start", "--pool", pool, "--type", "process", "--name", "milepost-up"]
    return Child("worker", command, environment(port), log_folder() / f"worker-{port}.log")
