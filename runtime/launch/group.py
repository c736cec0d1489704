"""The replicas of a job: which of them this one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from runtime.errors import ConfigError
from runtime.launch.submission import Payload
from runtime.rundir.layout import AttemptDir

RANK, SIZE = "BEAKER_REPLICA_RANK", "BEAKER_REPLICA_COUNT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rank and size of a replica group."""

    rank: int
    size: int

    @classmethod
    def of(cls, environ: Mapping[str, str], *, backend: str) -> Self:
        """Read them from the scheduler's environment.

        A job of a Ray cluster is one process, whose nodes are Ray's affair.
        """
        if backend != "beaker":
            return cls(rank=0, size=1)
        rank, size = environ.get(RANK), environ.get(SIZE)
        if rank is None and size is None:
            return cls(rank=0, size=1)
        try:
            found = cls(rank=int(rank or ""), size=int(size or ""))
        except ValueError as error:
            raise ConfigError(f"{RANK}={rank!r} and {SIZE}={size!r} name no replica") from error
        if not 0 <= found.rank < found.size:
            raise ConfigError(f"{RANK}={rank} of {SIZE}={size}: no such replica")
        return found


def lead(group: Group, attempt: AttemptDir, payload: Payload) -> dict[str, str]:
    raise NotImplementedError


def serve(group: Group, attempt: AttemptDir, payload: Payload, settled: Mapping[str, str]) -> int:
    raise NotImplementedError
