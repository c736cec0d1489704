"""`[launch]`: where a run is executed, and under which conditions of the scheduler."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from configs.names import ENV_NAME, has_token_prefix, is_owned, looks_like_token
from configs.section import Bytes, PositiveSeconds, Seconds, Section, Texts, parse_duration, refuse

_SECRET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_IMMUTABLE_IMAGE = re.compile(r"\S+@sha256:[0-9a-f]{64}|sha256:[0-9a-f]{64}|[0-9A-HJKMNP-TV-Z]{26}")
_MOUNT = re.compile(r"(?:(?P<source>[^:\s]+):)?(?P<path>/\S*)")

Backend = Literal["local", "ray", "kuberay", "beaker"]


def is_immutable_image(image: str) -> bool:
    """An image digest or a Beaker image id: no tag, no alias."""
    return _IMMUTABLE_IMAGE.fullmatch(image) is not None


def _min_runtime(value: object) -> object:
    # Absent, 0, "0", "0s" and "" all mean the same: no protection was asked for.
    return 0.0 if value == "" else parse_duration(value)


MinRuntime = Annotated[float, BeforeValidator(_min_runtime)]
"""A duration, for which nothing at all is a spelling of 0."""


class Launch(Section):
    """The scheduler's side of a run; none of it changes results."""

    aliases: ClassVar[dict[str, str]] = {"mounts": "weka_mounts"}

    backend: Backend = "local"
    """Who starts the processes."""
    cluster: str | None = None
    """As its profile names it (`ai2/jupiter`); the URL of a Ray cluster's job server; a context of
    the kubeconfig."""
    workspace: str | None = None
    """Workspace of the scheduler; absent: the profile's."""
    budget: str | None = None
    """Budget the job is charged to."""
    priority: Literal["low", "normal", "high", "urgent"] | None = None
    """Priority; absent: the profile's."""
    replicas: int = Field(default=1, ge=1)
    """Nodes. Several are one task with leader selection."""
    gpus_per_replica: int = Field(default=0, ge=0)
    """GPUs of each node; 0 is CPU only."""
    gpu_memory: Bytes | None = None
    """GPU memory this file was sized for; a cluster with another one warns."""
    memory: Bytes | None = None
    """Host memory of a replica, such as "256 GiB"; sets no GPU pool of an engine."""
    shared_memory: Bytes | None = None
    """Shared memory of a replica."""
    min_runtime: MinRuntime = 0.0
    """Protected, allocated scheduling for so long. Absent, 0, "0s" and "" mean none."""
    timeout: Seconds = 0.0
    """The scheduler ends the job after this; 0: no limit of ours."""
    synchronized_start_timeout: PositiveSeconds = 3600.0
    """Replicas of a group must all have started within this; bounds nothing else."""
    auto_resume: Literal["off", "milepost", "scheduler"] = "off"
    """Who submits again after a preemption or interruption."""
    detached: bool | None = None
    """The session goes on when nobody is attached. Absent: no with `local`, yes otherwise."""
    detach_grace: Seconds = 600.0
    """How long an unattended session, or a held step, waits before it commits and parks."""
    env: dict[str, str] = Field(default={})
    """Plain environment of the job; names the launcher owns are refused."""
    secrets: dict[str, str] = Field(default={})
    """Environment name -> *name* of a secret of the scheduler; never the secret."""
    weka_mounts: Texts = ()
    """Shared file systems: `/path`, or `source:/path`. Alias `mounts`."""
    image: str | None = None
    """Existing immutable image: a digest or a Beaker id; no tags."""
    requires: Texts = ()
    """Features the run needs of its image, looked up in the lock label before submission."""
    labels: Texts = ()
    """Labels of the run, such as `debug` or `smoke`."""

    @property
    def is_detached(self) -> bool:
        """Settled: a local run belongs to its terminal, another one to its scheduler."""
        return self.backend != "local" if self.detached is None else self.detached

    @property
    def mount_paths(self) -> tuple[str, ...]:
        """Absolute folders covered by mounts, without a trailing slash."""
        matches = (_MOUNT.fullmatch(mount) for mount in self.weka_mounts)
        return tuple(m["path"].rstrip("/") or "/" for m in matches if m is not None)

    def covers(self, path: object) -> bool:
        """The path lies under one of the mounts."""
        text = str(path)
        return any(
            text == mount or text.startswith(mount.rstrip("/") + "/") for mount in self.mount_paths
        )

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if ENV_NAME.fullmatch(name) is None:
                raise refuse(f"{name!r} is no name of an environment variable")
            if is_owned(name):
                raise refuse(f"the launcher owns {name}", allowed="leave it out")
            if has_token_prefix(value):
                raise refuse(
                    f"the value of {name} has the shape of a token",
                    allowed="the name of a secret, in launch.secrets",
                )
        return env

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, secret in secrets.items():
            if ENV_NAME.fullmatch(name) is None:
                raise refuse(f"{name!r} is no name of an environment variable")
            if is_owned(name):
                raise refuse(f"the launcher owns {name}", allowed="leave it out")
            if looks_like_token(secret):
                raise refuse(
                    f"{name} holds what looks like a token; change that token, it is in a file now",
                    allowed="the name of a secret of the scheduler",
                )
            if _SECRET_NAME.fullmatch(secret) is None:
                raise refuse(
                    f"{name} names no secret", allowed="letters, digits, dots, dashes, underscores"
                )
        return secrets

    @field_validator("weka_mounts")
    @classmethod
    def _check_mounts(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            if _MOUNT.fullmatch(mount) is None or "$" in mount:
                raise refuse(
                    f"{mount!r} is no mount", allowed='"/absolute/path" or "source:/absolute/path"'
                )
        return mounts

    @field_validator("image")
    @classmethod
    def _check_image(cls, image: str | None) -> Any:
        if image is not None and not is_immutable_image(image):
            raise refuse(
                "a tag or alias can come to mean another image",
                allowed='an image digest ("registry/name@sha256:...") or a Beaker image id',
            )
        return image
