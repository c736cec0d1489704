"""A real Ray cluster of several nodes on one machine: a network namespace each, where root allows.

Nodes then have addresses of their own, so that whatever listens on loopback, or takes the host's
name for its address, is found out. Elsewhere the nodes share the host, as Ray's own tests do.
"""

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

_START_S = 240
_CPUS = 4


@dataclass
class Node:
    """One raylet, or the head with its raylet."""

    address: str
    namespace: str | None
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End the node as a power failure does, the actors on it included."""
        tree = [*psutil.Process(self.process.pid).children(recursive=True)]
        for each in (psutil.Process(self.process.pid), *tree):
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.process.wait(30)
        psutil.wait_procs(tree, timeout=30)


@dataclass
class RayCluster:
    """A head and its workers; ends what it started."""

    folder: Path
    prefix: str
    has_namespaces: bool
    nodes: list[Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self._address(0)

    @property
    def url(self) -> str:
        return f"http://{self.head}:{self._port(8265)}"

    def add(self) -> Node:
        """Start one more node; the first is the head."""
        number = len(self.names)
        name = f"{self.prefix}{number}"
        self.names.append(name)
        if self.has_namespaces:
            self._make_namespace(name, number)
        log = (self.folder / f"node-{number}.log").open("wb")
        process = subprocess.Popen(
            [*self._within(name), sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
             f"--node-ip-address={self._address(number)}", f"--num-cpus={_CPUS}", "--num-gpus=0",
             "--object-store-memory=134217728", "--disable-usage-stats", *self._role(number)],
            env=self._environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=self.folder,
        )  # fmt: skip
        log.close()
        node = Node(self._address(number), name if self.has_namespaces else None, process)
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

    def _address(self, number: int) -> str:
        return f"10.83.0.{number + 1}" if self.has_namespaces else "127.0.0.1"

    def _port(self, port: int) -> int:
        return port if self.has_namespaces else port + 11000

    def _within(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", name] if self.has_namespaces else []

    def _make_namespace(self, name: str, number: int) -> None:
        for line in (
            f"ip netns add {name}",
            f"ip link add {name}v type veth peer name eth0 netns {name}",
            f"ip link set {name}v master {self.prefix}b up",
            f"ip -n {name} addr add {self._address(number)}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(line.split(), check=True)

    def close(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.kill()
        if self.has_namespaces:
            for name in self.names:
                subprocess.run(["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "link", "del", f"{self.prefix}b"], check=False)


def may_make_namespaces() -> bool:
    """Whether this user may; tried, since a container can forbid it to root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mp{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made.returncode == 0


@contextmanager
def running(nodes: int) -> Iterator[RayCluster]:
    """A cluster of so many nodes, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mpc"))
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "token").chmod(0o600)
    cluster = RayCluster(folder, f"mp{os.getpid()}n", may_make_namespaces())
    try:
        if cluster.has_namespaces:
            bridge = f"{cluster.prefix}b"
            subprocess.run(f"ip link add {bridge} type bridge".split(), check=True)
            subprocess.run(f"ip addr add 10.83.0.254/24 dev {bridge}".split(), check=True)
            subprocess.run(f"ip link set {bridge} up".split(), check=True)
        for _ in range(nodes):
            cluster.add()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
