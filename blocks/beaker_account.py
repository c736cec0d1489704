"""An account of the Beaker scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr

from blocks.address import Address

if TYPE_CHECKING:
    from beaker import Beaker


class BeakerAccount(Block):
    """A token of the Beaker scheduler, and where it is used."""

    # An address that is refused may hold a login.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Beaker Account"
    _block_type_slug: ClassVar[str | None] = "milepost-beaker-account"

    token: SecretStr = Field(title="Token", description="User token of the account.")
    workspace: str | None = Field(
        default=None,
        title="Workspace",
        description="Workspace of jobs that name none, such as ai2/open-instruct-dev.",
    )
    agent_address: Address | None = Field(
        default=None, title="Server", description="URL of the server; empty for beaker.org."
    )
    rpc_address: str | None = Field(
        default=None,
        title="RPC server",
        description="host:port of its gRPC side; empty for beaker.org.",
    )

    def client(self) -> Beaker:
        """A client with this token. Its calls have no deadline of their own: bound them.

        Raises:
            BeakerError: if the configuration is refused.
        """
        from beaker import Beaker

        named: dict[str, Any] = {"user_token": self.token.get_secret_value()}
        for field in ("agent_address", "rpc_address"):
            if (value := getattr(self, field)) is not None:
                named[field] = value
        return Beaker.from_env(check_for_upgrades=False, default_workspace=self.workspace, **named)
