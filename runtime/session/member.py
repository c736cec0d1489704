"""What a process on any node does first: tie itself to its guard, and find the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil

from runtime.rundir.processes import kill_children
from runtime.session import deadman
from runtime.session.nodes import LOOPBACK
from runtime.session.scratch import CACHES_VARIABLE, private_folder

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def join_attempt(
    attempt_dir: str, *, epoch: int, on_lost: Callable[[], None] = kill_children
) -> None:
    """Tie this process to the attempt's guard, and its collectives to the node's own address.

    Before it compiles anything: its compilers run what they find in their caches.

    Raises:
        SessionLost: if the folder around this node's caches is not of this user alone.
    """
    deadman.watch(attempt_dir, epoch=epoch, on_lost=on_lost)
    secure_caches()
    import ray

    address = ray.util.get_node_ip_address()
    if address != LOOPBACK and (interface := interface_of(address)) is not None:
        # Left alone, gloo takes whatever address the host's name stands for, often loopback.
        os.environ.setdefault(GLOO_INTERFACE, interface)


def secure_caches() -> None:
    """Make the folder around the caches that the environment names, if any; idempotent.

    The session checked it on its own node; on another one, whoever is first makes it, and a
    compiler would make it for everybody to look into.

    Raises:
        SessionLost: if somebody else made it, or can look into it, or it has no place here.
    """
    if root := os.environ.get(CACHES_VARIABLE):
        private_folder(Path(root).parent)


def interface_of(address: str) -> str | None:
    """The network interface of this host that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
