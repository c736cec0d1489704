"""The attempt's Ray: its own, started by the session and gone with it; or the one its job runs on.

Ray's head processes are children of this driver and die with it (parent-death signal); actors die
with their raylet. An inherited ``RAY_ADDRESS`` is followed only by an attempt that was submitted to
a cluster as a job of it (``JoinedRay``); nothing of that cluster is started or ended here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import Protocol

from runtime.errors import SessionLost
from runtime.session.nodes import Nodes
from runtime.session.ray_thread import RayThread

STORE_BYTES = 128 * 2**20
"""Ray's object store on a node: commands and small answers go through it, weights never do."""
_START_DEADLINE_S = 120.0
_STORE_LOST_S = 10
_STOP_DEADLINE_S = 30.0


def ray_settings(token: Path) -> dict[str, str]:
    """Variables of every Ray process of an attempt's own Ray, on whichever node.

    Args:
        token: file with the cluster's token.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_DEDUP_LOGS": "0",
        # Who ends a node has ended the session: there is nothing to drain for half a minute.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # The control store comes back to nobody: its loss is known after this.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_STORE_LOST_S),
    }


def set_environment(folder: Path) -> None:
    """Settings that Ray and its workers read from the environment; before ``import ray``."""
    token = folder / "token"
    if not token.exists():
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(ray_settings(token))


class SessionRay(Protocol):
    """The Ray of one session."""

    @property
    def nodes(self) -> Nodes:
        """Where actors go; known once it has started."""
        ...

    def start(self) -> None:
        """Make it answer; blocks, with a deadline, or until ``stop``.

        Raises:
            SessionError: if it does not, or ``stop`` was called first.
        """
        ...

    def stop(self) -> None:
        """Let go of it, also from another thread while ``start`` waits. Idempotent; blocks."""
        ...


class LocalRay:
    """A one-node Ray below ``folder``; ``set_environment`` comes before.

    Its processes get a parent-death signal of the thread that started them: it lives until
    ``stop``.
    """

    def __init__(self, folder: Path, *, num_gpus: int = 0) -> None:
        self._folder = folder
        self._num_gpus = num_gpus
        self._thread = RayThread(self._connect, self._disconnect)

    @property
    def nodes(self) -> Nodes:
        """Everything runs on this host."""
        return Nodes()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            SessionLost: if it does not start, with Ray's own words; or if it was stopped first.
        """
        try:
            self._thread.start(_START_DEADLINE_S)
        except SessionLost:
            raise
        except TimeoutError as error:
            raise SessionLost(f"Ray did not start within {_START_DEADLINE_S:g} s") from error
        except Exception as error:  # whatever Ray raises: none of its classes is about starting
            raise SessionLost(f"Ray did not start: {error}") from error

    def stop(self) -> None:
        """End all of it and remove the folder. Idempotent."""
        self._thread.end(_STOP_DEADLINE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self) -> None:
        import ray

        ray.init(
            address="local",
            num_cpus=os.cpu_count() or 1,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=str(self._folder / "ray"),
            _node_ip_address="127.0.0.1",
        )

    def _disconnect(self) -> None:
        import ray

        ray.shutdown()


def keep_job_environment() -> None:
    """As ``set_environment``, for an attempt that is a job of a cluster: address and token stay."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")


def take_signals_back() -> None:
    """Put this process's own handlers back; on the main thread, once Ray has started.

    Ray's core takes SIGTERM for a crash: it prints a trace, sets an alarm, and three seconds later
    the process aborts, in the middle of the commit it was asked to make.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)


def ray_logs(folder: Path) -> Path:
    """Where Ray's per-process logs of this attempt are."""
    return folder / "ray" / "session_latest" / "logs"
