"""What a SGLang server is started with, and the command line that comes of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from configs.engine_args import Scalar, flag_of, is_owned_flag
from runtime.engines.keepalive import SERVER_KEEPALIVE_S

ON_CPU: dict[str, Scalar] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
}
"""What the server needs to run without a GPU; a run file may say otherwise."""


class SglangSettings(BaseModel):
    """Settings of one server."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: str
    """HF folder with config.json and safetensors."""
    python: str
    """Interpreter of the environment that has SGLang."""
    host: str = "127.0.0.1"
    """Address it listens on; the port is its own choice."""
    api_key: SecretStr | None = None
    """Bearer token of every call but /health*. Never on a command line or in a log."""
    device: str = "cuda"
    """``cuda``, or ``cpu``."""
    dtype: str = "auto"
    """Of weights and KV; auto: as the folder says."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel size: the devices it sees are all its own."""
    max_running_requests: int = Field(default=256, ge=1)
    """Most responses decoded at once."""
    waiting_timeout_s: float | None = Field(default=None, gt=0)
    """A response that was not started after this long ends with 503."""
    running_timeout_s: float | None = Field(default=None, gt=0)
    """A response that runs longer than this ends with 503."""
    watchdog_timeout_s: float = Field(default=300.0, gt=0)
    """A forward step that takes longer ends the server, by its own watchdog."""
    keepalive_s: float = Field(default=SERVER_KEEPALIVE_S, gt=0)
    """How long idle connections are kept; rounded up to whole seconds."""
    seed: int | None = None
    """Of sampling for requests that bring none."""
    threads: int = Field(default=1, ge=1)
    """Threads of arithmetic on a CPU."""
    sleeps: bool = False
    """Its memory can be given back while it rests (``release_memory``)."""
    cache_root: str | None = None
    """One folder for kernels and other compiled things; None: the user's cache folder."""
    args: dict[str, Scalar] = {}
    """Further arguments, as the run file has them."""


def command_line(settings: SglangSettings) -> list[str]:
    """Arguments of the server, without host, port and key, which travel another way.

    What the run file adds comes first, so that ours win wherever the server accepts a name in two
    spellings.

    Raises:
        ValueError: if the run file sets what is ours to set; ``validate`` says so before.
    """
    theirs = {flag_of(name): value for name, value in settings.args.items()}
    for name in theirs:
        if is_owned_flag(name):
            raise ValueError(f"engine argument --{name} is set by Milepost itself")
    defaults = ON_CPU if settings.device == "cpu" else {}
    ours: dict[str, Scalar] = {
        "model-path": settings.model_path,
        "device": settings.device,
        "dtype": settings.dtype,
        "tp-size": settings.tensor,
        "max-running-requests": settings.max_running_requests,
        "watchdog-timeout": settings.watchdog_timeout_s,
        "skip-server-warmup": True,
    }
    if settings.seed is not None:
        ours["random-seed"] = settings.seed
    if settings.sleeps:
        ours["enable-memory-saver"] = True
    return _flags(defaults | theirs) + _flags(ours)


def _flags(args: dict[str, Scalar]) -> list[str]:
    line: list[str] = []
    for name, value in args.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not False:
            line += [f"--{name}", str(value)]
    return line
