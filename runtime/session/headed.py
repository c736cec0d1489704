"""The Ray of a replica group: started by the leader's session, joined by the other replicas.

The head is published with a beat; a replica counts once its nonce is acknowledged and its node is
alive. Nothing starts before all of them are there.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from configs.topology import Topology
from runtime.errors import GroupIncomplete
from runtime.launch.rendezvous import BEAT_S, Head, Rendezvous
from runtime.rundir.layout import AttemptDir
from runtime.session.cluster import STORE_BYTES
from runtime.session.joined import JoinedRay


class HeadRay(JoinedRay):
    """Implements SessionRay: this session's own Ray, on an address that the group reaches."""

    def __init__(
        self,
        topology: Topology,
        *,
        address: str,
        env: dict[str, str],
        placement_deadline_s: float,
        attempt: AttemptDir,
        epoch: int,
        scratch: Path,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            topology: the group's.
            address: of this host, as the other replicas reach it.
            env: for every process of the session.
            placement_deadline_s: how long replicas may take to join.
            attempt: where the head is published.
            epoch: of this session.
            scratch: short local folder of Ray's sockets and of the token.
        """
        super().__init__(
            topology, address=address, env=env, placement_deadline_s=placement_deadline_s
        )
        self._scratch = scratch
        self._epoch = epoch
        self._meeting = Rendezvous.of(attempt)
        self._token = attempt.epoch(epoch) / "token"
        self._beating = threading.Event()

    def _connect(self) -> None:
        import ray

        ray.init(
            address="local",
            num_cpus=os.cpu_count() or 1,
            num_gpus=self._topology.gpus_per_replica,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._scratch / "ray"),
            _node_ip_address=self._address,
            runtime_env={"env_vars": self._env},
        )
        address = ray.get_runtime_context().gcs_address
        self._share_token()
        beat = threading.Thread(target=self._beat, args=(address,), name="head-beat", daemon=True)
        beat.start()
        self._wait_for_nodes()

    def _disconnect(self) -> None:
        self._beating.set()
        super()._disconnect()
        self._token.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _share_token(self) -> None:
        """The cluster's token for the other replicas: a file of this user alone, for this epoch."""
        source = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        self._token.parent.mkdir(exist_ok=True)
        descriptor = os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(source.read_bytes())

    def _beat(self, address: str) -> None:
        count = 0
        while True:
            count += 1
            counted = {rank: each.nonce for rank, each in self._meeting.replicas().items()}
            self._meeting.publish(
                Head(
                    epoch=self._epoch,
                    address=address,
                    token=str(self._token),
                    beat=count,
                    acknowledged=counted,
                )
            )
            if self._beating.wait(BEAT_S):
                return

    def _wait_for_nodes(self) -> None:
        import ray

        wanted = self._topology.replicas
        waited_s = 0.0
        while True:
            alive: list[dict[str, Any]] = [each for each in ray.nodes() if each["Alive"]]
            if len(alive) >= wanted:
                return
            self._thread.raise_if_over()
            if waited_s >= self._deadline_s:
                there = ", ".join(str(each["NodeManagerAddress"]) for each in alive)
                raise GroupIncomplete(
                    f"{len(alive)} of {wanted} replicas joined within {self._deadline_s:g} s: "
                    f"{there}"
                )
            self._thread.is_over.wait(1.0)
            waited_s += 1.0
