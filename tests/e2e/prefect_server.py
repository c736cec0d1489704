"""A Prefect server of the test's own, which can be killed and started again on its database."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)

from flows.commands._server import HOST, api_url, environment, is_healthy

PREFECT = (sys.executable, "-m", "prefect")
START_S = 240.0
"""A new database on a busy machine; the server says when it is there."""


class PrefectServer:
    """One database and one port; a process while it is up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        self.url = api_url(self.port)
        self.log = folder / "server.log"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        database = f"sqlite+aiosqlite:///{self._folder}/prefect.db"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*PREFECT, "server", "start", "--host", HOST, "--port", str(self.port)],
                env={
                    **os.environ,
                    **environment(self.port),
                    "PREFECT_HOME": str(self._folder),
                    "PREFECT_API_DATABASE_CONNECTION_URL": database,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not is_healthy(self.port):
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to all of it, as a lost machine would; the database stays. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # Its session is its own: the command, its server, and nothing else.
        group = [p for p in psutil.process_iter() if _group(p.pid) == process.pid]
        for member in group:
            member.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(group, timeout=20)

    @property
    def is_up(self) -> bool:
        return self._process is not None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@contextmanager
def prefect_server(folder: Path) -> Generator[PrefectServer]:
    """A server that flows of this process, and of its children by the environment, talk to."""
    server = PrefectServer(folder)
    before = os.environ.get("PREFECT_API_URL")
    try:
        server.start()
        os.environ["PREFECT_API_URL"] = server.url
        with temporary_settings(
            # The heartbeat's thread adds a second to every flow run; nothing here watches it.
            {PREFECT_API_URL: server.url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        ):
            yield server
    finally:
        if before is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = before
        server.kill()
