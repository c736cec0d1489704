"""What an embedded engine is started with. Loads neither torch nor aiohttp."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from runtime.engines.keepalive import SERVER_KEEPALIVE_S


class EngineSettings(BaseModel):
    """Settings of one server. Names follow SGLang's flags where it has the same thing."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: str
    """Folder with config.json, safetensors and, where there is one, tokenizer.json."""
    host: str = "127.0.0.1"
    """Any address but a loopback one needs an api_key."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one, reported when the server is ready."""
    api_key: SecretStr | None = None
    """Bearer token of every call but /health*."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; auto: as the folder says."""
    context_length: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response; None: the model's own."""
    max_running_requests: int = Field(default=256, ge=1)
    """Most responses decoded at once."""
    max_queued_requests: int | None = Field(default=4096, ge=1)
    """Most responses that wait; one more is refused with 503. None: no limit."""
    max_total_tokens: int | None = Field(default=None, ge=16)
    """KV positions (slots x longest request); None: what kv_bytes holds."""
    kv_bytes: int = Field(default=2 * 2**30, ge=2**16)
    """Memory for KV where max_total_tokens is not given."""
    prefix_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for prompts that may come again."""
    waiting_timeout_s: float | None = Field(default=None, gt=0)
    """A response that was not started after this long ends with 503."""
    running_timeout_s: float | None = Field(default=None, gt=0)
    """A response that runs longer than this ends with 503."""
    probe_timeout_s: float = Field(default=20.0, gt=0)
    """Limit of the token that /health_generate asks for."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """Limit of joining a broadcast group and of each bucket."""
    keepalive_s: float = Field(default=SERVER_KEEPALIVE_S, gt=0)
    """How long idle connections are kept."""
    max_body_bytes: int = Field(default=2**30, ge=2**16)
    """Largest request body."""
    weight_version: str = "default"
    """Name of the weights it starts with."""
    seed: int | None = None
    """Of sampling seeds for requests that bring none; None: engines and restarts all differ."""
    torch_threads: int = Field(default=1, ge=1)
    """Threads of the decoder's arithmetic."""

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host!r} is no loopback address: set an api_key")
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
