"""Joining the Ray cluster that the attempt's job runs on: one bundle a node, on distinct nodes."""

from __future__ import annotations

import os
import time
from typing import Any

from configs.topology import Topology
from runtime.errors import RunError, SessionLost, WaitTimeout
from runtime.session.nodes import Node, Nodes
from runtime.session.ray_thread import RayThread

START_DEADLINE_S = 120.0
_STOP_DEADLINE_S = 30.0
_LOOK_S = 1.0
"""Between looks whether anybody still wants the nodes that are waited for."""


class JoinedRay:
    """Implements SessionRay over a cluster that outlives us."""

    def __init__(
        self,
        topology: Topology,
        *,
        address: str,
        env: dict[str, str],
        placement_deadline_s: float,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            topology: a bundle for each replica, with its GPUs.
            address: of the cluster's control store.
            env: for every process that the session starts there.
            placement_deadline_s: how long the nodes may take to be free.
        """
        self._topology = topology
        self._address = address
        self._env = env
        self._deadline_s = placement_deadline_s
        self._nodes = Nodes()
        self._thread = RayThread(self._come_up, self._disconnect)

    @property
    def nodes(self) -> Nodes:
        """The group's nodes, by bundle."""
        return self._nodes

    def start(self) -> None:
        """Connect, reserve one bundle a node on distinct nodes, and learn their addresses.

        Raises:
            SessionLost: if the cluster does not answer, or this was stopped first.
            WaitTimeout: if the nodes were not free in time; says what was asked and what there is.
        """
        try:
            self._thread.start(START_DEADLINE_S + self._deadline_s)
        except RunError:
            raise
        except TimeoutError as error:
            raise SessionLost(
                f"the Ray cluster at {self._address} did not answer within {START_DEADLINE_S:g} s"
            ) from error
        except Exception as error:  # whatever Ray raises: none of its classes is about joining
            raise SessionLost(f"cannot join the Ray cluster at {self._address}: {error}") from error

    def stop(self) -> None:
        """Give the bundles back and disconnect; actors of this session end with that. Idempotent.

        The cluster goes on.
        """
        self._thread.end(_STOP_DEADLINE_S)
        # Nobody can be asked about them any more.
        self._nodes = Nodes()

    def _come_up(self) -> None:
        self._connect()
        self._nodes = self._reserve()

    def _connect(self) -> None:
        import ray

        ray.init(
            address=self._address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": self._env},
        )

    def _disconnect(self) -> None:
        import ray

        ray.shutdown()

    def _reserve(self) -> Nodes:
        from ray.util.placement_group import placement_group, placement_group_table

        bundles = [self._bundle() for _ in range(self._topology.replicas)]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        until = time.monotonic() + self._deadline_s
        while not group.wait(min(_LOOK_S, self._deadline_s)):
            self._thread.raise_if_over()
            if time.monotonic() >= until:
                raise WaitTimeout(
                    f"{len(bundles)} nodes with {bundles[0]} each were not free within "
                    f"{self._deadline_s:g} s; the cluster has {_inventory()}"
                )
        places: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        addresses = _addresses()
        nodes = tuple(
            Node(id=places[index], address=addresses[places[index]])
            for index in range(len(bundles))
        )
        return Nodes(nodes=nodes, group=group)

    def _bundle(self) -> dict[str, float]:
        gpus = self._topology.gpus_per_replica
        # Actors ask for no CPU of their own; one marks the node as taken.
        return {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}


def _addresses() -> dict[str, str]:
    return {each["NodeID"]: each["NodeManagerAddress"] for each in _known()}


def _inventory() -> str:
    alive = [each for each in _known() if each["Alive"]]
    each_has = [
        f"{each['NodeManagerAddress']}: {each['Resources'].get('CPU', 0):g} CPU, "
        f"{each['Resources'].get('GPU', 0):g} GPU"
        for each in alive
    ]
    return f"{len(alive)} node(s) ({'; '.join(each_has)})"


def _known() -> list[dict[str, Any]]:
    import ray

    return ray.nodes()


def job_address() -> str:
    """The address of the cluster whose job this process is.

    Raises:
        SessionLost: if it is none's.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise SessionLost("this attempt is to join its job's Ray cluster, and RAY_ADDRESS is unset")
    return address
