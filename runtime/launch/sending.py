"""Which backend a run file means, with what the submitter's surroundings say about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from configs.run import RunSpec
from runtime.errors import ConfigError
from runtime.launch.backend import LaunchBackend
from runtime.launch.submitting import Sender


def sender_of(
    spec: RunSpec,
    *,
    backend: LaunchBackend | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Sender:
    """A sender for a run file, by the credentials of this process. Nothing is sent.

    Args:
        spec: the run.
        backend: with credentials of its own; None takes the one that the run file names.
        environ: of this process.

    Args:
        spec: the run.
        backend: with credentials of its own; None takes the one that the run file names.
        environ: of this process.

    Raises:
        ConfigError: if the backend's address or image is missing, or an image is named twice.
    """
    from runtime.launch.image.choosing import existing_image

    revision, dirty = _checkout()
    return Sender(
        backend=backend or backend_of(spec, environ=environ),
        image=existing_image(spec.launch.image, environ),
        revision=revision,
        dirty=dirty,
    )


def backend_of(spec: RunSpec, *, environ: Mapping[str, str] = os.environ) -> LaunchBackend:
    """The backend that a run file names.

    Raises:
        ConfigError: if it is local, or its address is not known.
    """
    launch = spec.launch
    if launch.backend == "ray":
        from runtime.launch.ray_jobs import ray_backend

        return ray_backend(launch.cluster, environ=environ)
    if launch.backend == "kuberay":
        from runtime.launch.kuberay import kuberay_backend

        return kuberay_backend(launch.cluster, environ=environ)
    if launch.backend == "beaker":
        from runtime.launch.beaker import beaker_backend

        return beaker_backend(launch.workspace, environ=environ)
    raise ConfigError(f'launch.backend = "{launch.backend}" submits nothing')


def _checkout() -> tuple[str | None, bool]:
    """Commit and dirtiness of this Milepost's checkout; (None, False) outside of one."""
    from runtime.launch.image.source import Checkout

    try:
        revision = Checkout(Path(__file__).resolve().parents[2]).revision()
    except ConfigError:
        return None, False
    return revision.commit, revision.is_dirty
