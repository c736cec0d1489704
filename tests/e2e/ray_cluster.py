"""A real Ray cluster of several nodes on one machine, on hosts of their own where root allows."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.namespaces import Network, network

_START_S = 240
_CPUS = 4


@dataclass
class Node:
    """One raylet, or the head with its raylet."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End the node as a power failure does, the actors on it included."""
        kill_tree(self.process)


@dataclass
class RayCluster:
    """A head and its workers; ends what it started."""

    folder: Path
    network: Network
    nodes: list[Node] = field(default_factory=list)

    @property
    def has_namespaces(self) -> bool:
        return self.network.is_real

    @property
    def head(self) -> str:
        return self.network.address(0)

    @property
    def url(self) -> str:
        return f"http://{self.head}:{self._port(8265)}"

    def add(self) -> Node:
        """Start one more node; the first is the head."""
        number = self.network.add()
        log = (self.folder / f"node-{number}.log").open("wb")
        process = subprocess.Popen(
            [*self.network.within(number), sys.executable, "-m", "ray.scripts.scripts", "start",
             "--block", f"--node-ip-address={self.network.address(number)}",
             f"--num-cpus={_CPUS}", "--num-gpus=0", "--object-store-memory=134217728",
             "--disable-usage-stats", *self._role(number)],
            env=self._environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=self.folder,
        )  # fmt: skip
        log.close()
        node = Node(process)
        self.nodes.append(node)
        if number == 0:
            self._wait_for_head(node)
        return node

    def _role(self, number: int) -> list[str]:
        gcs = self._port(6390)
        if number:
            return [f"--address={self.head}:{gcs}"]
        return [
            "--head", f"--port={gcs}", f"--dashboard-host={self.head}",
            f"--dashboard-port={self._port(8265)}", f"--temp-dir={self.folder / 'r'}",
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
        paths = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        return {
            **kept,
            "PATH": paths,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_memory_monitor_refresh_ms": "0",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def token_path(self) -> Path:
        return self.folder / "token"

    def _wait_for_head(self, node: Node) -> None:
        token = self.token_path.read_text()
        asked = urllib.request.Request(
            f"{self.url}/api/version", headers={"Authorization": f"Bearer {token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + _START_S
        while True:
            try:
                opener.open(asked, timeout=5).close()
                return
            except OSError:
                log = (self.folder / "node-0.log").read_text()
                assert node.process.poll() is None, log
                assert time.monotonic() < until, log
                time.sleep(0.5)

    def _port(self, port: int) -> int:
        return port if self.has_namespaces else port + 11000

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL of a process and all that it started, and their end."""
    tree = [*psutil.Process(process.pid).children(recursive=True)]
    for each in (psutil.Process(process.pid), *tree):
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait(30)
    psutil.wait_procs(tree, timeout=30)


@contextmanager
def running(nodes: int) -> Iterator[RayCluster]:
    """A cluster of so many nodes, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mpc"))
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "token").chmod(0o600)
    with network(f"mp{os.getpid()}n", "10.83.0") as hosts:
        cluster = RayCluster(folder, hosts)
        try:
            for _ in range(nodes):
                cluster.add()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)
