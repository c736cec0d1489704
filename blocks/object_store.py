"""An S3-compatible object store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, model_validator

from blocks.address import Address

if TYPE_CHECKING:
    from botocore.client import BaseClient

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_ATTEMPTS = 4
"""Of one call, the first included: a store that is away costs minutes, not the run."""


class ObjectStore(Block):
    """A bucket for checkpoint uploads, exports and prepared data."""

    # An address that is refused may hold a login.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Object Store"
    _block_type_slug: ClassVar[str | None] = "milepost-object-store"

    bucket: str = Field(title="Bucket", description="Name of the bucket.", min_length=1)
    prefix: str = Field(
        default="", title="Prefix", description="Put before every key, such as runs/."
    )
    endpoint_url: Address | None = Field(
        default=None, title="Endpoint", description="URL of the store; empty for AWS S3."
    )
    region: str | None = Field(default=None, title="Region", description="Region of the bucket.")
    access_key_id: str | None = Field(
        default=None,
        title="Access key",
        description="Empty takes the credentials of the machine (role, profile, environment).",
    )
    secret_access_key: SecretStr | None = Field(
        default=None, title="Secret key", description="Belongs to the access key."
    )
    session_token: SecretStr | None = Field(
        default=None, title="Session token", description="Of temporary credentials."
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key are given together or not at all")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token belongs to an access_key_id")
        return self

    def client(self) -> BaseClient:
        """An S3 client with bounded timeouts and retries; safe to share between threads."""
        from boto3.session import Session
        from botocore.config import Config

        keys: dict[str, Any] = {}
        if self.access_key_id is not None:
            keys["aws_access_key_id"] = self.access_key_id
        if self.secret_access_key is not None:
            keys["aws_secret_access_key"] = self.secret_access_key.get_secret_value()
        if self.session_token is not None:
            keys["aws_session_token"] = self.session_token.get_secret_value()
        return Session(**keys).client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            ),
        )

    def key(self, name: str) -> str:
        """The object key of a name below the prefix."""
        return f"{self.prefix.rstrip('/')}/{name}" if self.prefix else name
