"""Hosts on one machine: a network namespace each on a bridge, where root allows.

They then have addresses of their own, so that whatever listens on loopback, or takes the host's
name for its address, is found out. Elsewhere they all are this host, as in Ray's own tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Network:
    """A bridge and what hangs on it; ``running`` takes it down again."""

    prefix: str
    """Of names: short, since those of interfaces are."""
    subnet: str
    """``10.83.0``: this machine is .254 in it, hosts are .1 and on."""
    is_real: bool
    names: list[str] = field(default_factory=list)

    def add(self) -> int:
        """One more host; its number."""
        number = len(self.names)
        self.names.append(f"{self.prefix}{number}")
        if self.is_real:
            name = self.names[number]
            self._do(
                f"ip netns add {name}",
                f"ip link add {name}v type veth peer name eth0 netns {name}",
                f"ip link set {name}v master {self.prefix}b up",
                f"ip -n {name} addr add {self.address(number)}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
                f"ip -n {name} link set lo up",
            )
        return number

    def address(self, number: int) -> str:
        """Of a host, also before it is there."""
        return f"{self.subnet}.{number + 1}" if self.is_real else "127.0.0.1"

    def within(self, number: int) -> list[str]:
        """What a command line begins with to run on a host."""
        return ["ip", "netns", "exec", self.names[number]] if self.is_real else []

    def open(self) -> None:
        bridge = f"{self.prefix}b"
        if self.is_real:
            self._do(
                f"ip link add {bridge} type bridge",
                f"ip addr add {self.subnet}.254/24 dev {bridge}",
                f"ip link set {bridge} up",
            )

    def close(self) -> None:
        if self.is_real:
            for name in self.names:
                subprocess.run(["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "link", "del", f"{self.prefix}b"], check=False)

    def _do(self, *lines: str) -> None:
        for line in lines:
            subprocess.run(line.split(), check=True)


@contextmanager
def network(prefix: str, subnet: str) -> Iterator[Network]:
    """A network without hosts, gone afterwards."""
    made = Network(prefix, subnet, _may_make_namespaces())
    try:
        made.open()
        yield made
    finally:
        made.close()


def _may_make_namespaces() -> bool:
    """Whether this user may; tried, since a container can forbid it to root."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mp{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made.returncode == 0
