"""Which attention backend a host's GPUs can run, against the one the plan settled."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from configs.clusters import ATTENTION_BY_GENERATION
from runtime.errors import PreflightFailed
from runtime.launch.preflight.gpus import Gpu, inventory

_RUNS_ON = {
    "flash_4": ("blackwell",),
    "flash_3": ("hopper",),
    "flash_2": ("ampere", "hopper", "blackwell"),
    "sdpa": ("ampere", "hopper", "blackwell", "other"),
}


def settle(gpus: Sequence[Gpu], asked: str) -> str:
    """The backend of this host.

    Args:
        gpus: those that the job sees.
        asked: the plan's; ``auto`` where only the job can tell.

    Raises:
        PreflightFailed: if the GPUs are of several generations, or cannot run what is asked.
    """
    generations = sorted({gpu.generation for gpu in gpus})
    if len(generations) != 1:
        raise PreflightFailed(f"GPUs of several generations on one host: {', '.join(generations)}")
    generation = generations[0]
    if asked == "auto":
        usual = {str(name): backend for name, backend in ATTENTION_BY_GENERATION.items()}
        return usual.get(generation, "sdpa")
    if generation not in _RUNS_ON.get(asked, ()):
        able = ", ".join(name for name, where in _RUNS_ON.items() if generation in where)
        raise PreflightFailed(
            f"core.attention_backend = {asked} does not run on {gpus[0].name}; there: {able}"
        )
    return asked


def main() -> int:
    """Entry point ``attention-preflight``: print the backend of this host."""
    try:
        sys.stdout.write(f"{settle(inventory(), 'auto')}\n")
    except PreflightFailed as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
