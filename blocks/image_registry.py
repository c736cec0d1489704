"""A registry that images are built into."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from typing import ClassVar, Self

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator


class ImageRegistry(Block):
    """A registry's host and the login for it."""

    # An address that is refused may hold a login.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Image Registry"
    _block_type_slug: ClassVar[str | None] = "milepost-image-registry"

    host: str = Field(
        title="Host",
        description="Host of the registry, with its port, such as registry.example.org:5000.",
        min_length=1,
    )
    repository: str = Field(
        default="milepost",
        title="Repository",
        description="Name that images are built into, below the host.",
    )
    username: str | None = Field(
        default=None, title="User", description="Empty where the registry asks for no login."
    )
    password: SecretStr | None = Field(
        default=None, title="Password", description="Password or access token of the user."
    )

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        if "@" in host or "://" in host:
            raise ValueError("host:port alone; the login has fields of its own")
        return host

    @model_validator(mode="after")
    def _login_is_whole(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password are given together or not at all")
        return self

    @property
    def target(self) -> str:
        """What ``milepost image build`` builds into."""
        return f"{self.host}/{self.repository}"

    def docker_config(self) -> Path:
        """Write the login as a docker config of this user alone; the folder for DOCKER_CONFIG.

        The password is in that file, as container tools keep it.
        """
        folder = Path(tempfile.mkdtemp(prefix="mp-docker-"))
        auths: dict[str, dict[str, str]] = {}
        if self.username is not None and self.password is not None:
            login = f"{self.username}:{self.password.get_secret_value()}"
            auths[self.host] = {"auth": base64.b64encode(login.encode()).decode()}
        descriptor = os.open(folder / "config.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"auths": auths}, file)
        return folder
