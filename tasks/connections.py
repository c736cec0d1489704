"""From blocks, or this machine's own credentials, to a sender."""

from __future__ import annotations

import os

from blocks import BeakerAccount, ImageRegistry, RayCluster
from configs.run import RunSpec
from runtime.launch.backend import LaunchBackend
from runtime.launch.sending import sender_of
from runtime.launch.submitting import Sender


def sender_for(
    spec: RunSpec,
    registry: ImageRegistry | None,
    ray_cluster: RayCluster | None,
    beaker: BeakerAccount | None,
) -> Sender:
    """The sender of a run file; a block that belongs to its backend comes before the machine's.

    Raises:
        ConfigError: if the backend's address is not known.
    """
    if registry is not None:
        # The registry's client reads the docker config, wherever it is used in this flow.
        os.environ["DOCKER_CONFIG"] = str(registry.docker_config())
    backend = _from_block(spec, ray_cluster, beaker)
    if backend is None:
        return sender_of(spec)
    return sender_of(spec, backend=backend)


def _from_block(
    spec: RunSpec, ray_cluster: RayCluster | None, beaker: BeakerAccount | None
) -> LaunchBackend | None:
    backend = spec.launch.backend
    if backend == "ray" and ray_cluster is not None:
        from runtime.launch.ray_jobs import RayJobs

        return RayJobs(
            ray_cluster.address, token=ray_cluster.auth_token, metadata=ray_cluster.metadata
        )
    if backend == "beaker" and beaker is not None:
        from runtime.launch.beaker import BeakerLaunch

        return BeakerLaunch(beaker.client, workspace=spec.launch.workspace or beaker.workspace)
    return None
