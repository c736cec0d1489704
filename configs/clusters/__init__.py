"""Cluster profiles: facts about machines, as data.

One TOML file per cluster beside this module. Code asks a profile; it never names a cluster.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from configs.section import Bytes, Seconds, Section, Texts

AttentionName = Literal["flash_4", "flash_3", "flash_2", "sdpa"]
Generation = Literal["ampere", "hopper", "blackwell"]

IMAGE_CUDA = 13.0
"""CUDA of the locked image."""
COMPATIBILITY_PATH = (
    "/usr/local/cuda/compat:/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/usr/local/cuda/lib64"
)
"""Library path of a job whose host driver is older than the image's CUDA."""
ATTENTION_BY_GENERATION: dict[Generation, AttentionName] = {
    "blackwell": "flash_4",
    "hopper": "flash_3",
    "ampere": "flash_2",
}


class Placement(Section):
    """A placement that was tried."""

    replicas: int = Field(ge=1)
    """Nodes."""
    gpus_per_replica: int = Field(ge=0)
    """GPUs of each."""


class ClusterProfile(Section):
    """One cluster."""

    name: str
    """As the scheduler knows it."""
    gpu: str
    """Model of its GPUs."""
    generation: Generation
    """Architecture of its GPUs."""
    gpu_memory: Bytes
    """Memory of one GPU."""
    gpus_per_node: int = Field(ge=1)
    """GPUs of one node."""
    driver_cuda: float
    """CUDA version of the host driver."""
    attention: AttentionName
    """Attention backend that `auto` means here."""
    workspace: str
    """Workspace of a job that names none."""
    priority: Literal["low", "normal", "high", "urgent"] = "high"
    """Priority of a job that names none."""
    priorities: Texts = ("low", "normal", "high", "urgent")
    """Priorities it knows."""
    takes_cpu_jobs: bool = True
    """CPU-only jobs may go here."""
    max_protection: Seconds | None = None
    """Longest protected time it grants; None: not known."""
    placements: tuple[Placement, ...] = Field(default=(), strict=False)
    """Placements that were tried."""

    @property
    def needs_compatibility_path(self) -> bool:
        """The host driver is older than the image's CUDA."""
        return self.driver_cuda < IMAGE_CUDA


def find_profile(cluster: str | None) -> ClusterProfile | None:
    """Profile of a cluster by its scheduler's name; None where there is none."""
    return None if cluster is None else _profiles().get(cluster)


def profile_names() -> list[str]:
    """Names of all known clusters."""
    return sorted(_profiles())


@cache
def _profiles() -> dict[str, ClusterProfile]:
    folder = Path(__file__).parent
    profiles = (
        ClusterProfile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        for file in sorted(folder.glob("*.toml"))
    )
    return {profile.name: profile for profile in profiles}
