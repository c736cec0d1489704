"""A Ray cluster that takes jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr, field_validator

from blocks.address import Address

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


class RayCluster(Block):
    """A Ray cluster that Milepost submits its guard to, as a Ray job.

    A run on this machine needs none: it starts a Ray of its own.
    """

    # An address that is refused may hold a login.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Ray Cluster"
    _block_type_slug: ClassVar[str | None] = "milepost-ray-cluster"

    address: Address = Field(
        title="Address",
        description="URL of the head's dashboard and job server, such as http://10.0.0.7:8265.",
    )
    auth_token: SecretStr | None = Field(
        default=None,
        title="Token",
        description="Ray's authentication token. Without one the cluster must have none either.",
    )
    namespace: str = Field(
        default="milepost",
        title="Namespace",
        description="Ray namespace of the actors; one cluster can hold several.",
    )
    metadata: dict[str, str] = Field(
        default_factory=dict,
        title="Metadata",
        description="Added to every submitted job, for whoever looks at the dashboard.",
    )

    @field_validator("address", mode="before")
    @classmethod
    def _is_job_server(cls, address: object) -> object:
        if isinstance(address, str) and address.startswith("ray://"):
            raise ValueError(
                "give the job server's URL (http://host:8265); the ray:// client is not used, "
                "since it dies with its connection"
            )
        return address

    @property
    def auth_mode(self) -> Literal["token", "disabled"]:
        """``RAY_AUTH_MODE``, always said: unset, a head may find a token and a client none."""
        return "disabled" if self.auth_token is None else "token"

    def environment(self) -> dict[str, str]:
        """Variables for a process that talks to the cluster, the token in plain text."""
        named = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": self.auth_mode}
        if self.auth_token is not None:
            named["RAY_AUTH_TOKEN"] = self.auth_token.get_secret_value()
        return named

    def job_client(self) -> JobSubmissionClient:
        """A client of the job server; asks for its version at once. Imports Ray.

        Raises:
            ConnectionError: if the job server does not answer.
        """
        from ray.job_submission import JobSubmissionClient

        headers = None
        if self.auth_token is not None:
            headers = {"Authorization": f"Bearer {self.auth_token.get_secret_value()}"}
        metadata = {**self.metadata, "namespace": self.namespace}
        return JobSubmissionClient(self.address, metadata=metadata, headers=headers)
