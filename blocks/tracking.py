"""Where metrics go: a Weights & Biases account."""

from __future__ import annotations

from typing import ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, SecretStr

from blocks.address import Address


class Tracking(Block):
    """A Weights & Biases project and the key to it.

    The run file says what is tracked; this says with whose account.
    """

    # An address that is refused may hold a login.
    model_config = ConfigDict(hide_input_in_errors=True)

    _block_type_name: ClassVar[str | None] = "Tracking"
    _block_type_slug: ClassVar[str | None] = "milepost-tracking"

    project: str = Field(
        default="milepost", title="Project", description="W&B project of the runs."
    )
    entity: str | None = Field(
        default=None, title="Entity", description="W&B team or user; empty takes the key's own."
    )
    mode: Literal["online", "offline", "disabled"] = Field(
        default="online",
        title="Mode",
        description="Offline files hold the same series and merge at `wandb sync`.",
    )
    api_key: SecretStr | None = Field(
        default=None, title="API key", description="Without one, online becomes offline."
    )
    base_url: Address | None = Field(
        default=None, title="Server", description="URL of a W&B server of your own."
    )

    @property
    def settled_mode(self) -> Literal["online", "offline", "disabled"]:
        """The mode that comes of mode and key: nobody is ever prompted for a key."""
        return "offline" if self.mode == "online" and self.api_key is None else self.mode

    def environment(self) -> dict[str, str]:
        """Variables for a process that logs to W&B, the key in plain text."""
        named = {"WANDB_MODE": self.settled_mode, "WANDB_PROJECT": self.project}
        if self.entity is not None:
            named["WANDB_ENTITY"] = self.entity
        if self.base_url is not None:
            named["WANDB_BASE_URL"] = self.base_url
        if self.api_key is not None:
            named["WANDB_API_KEY"] = self.api_key.get_secret_value()
        return named
