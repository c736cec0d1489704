"""One rank of a trainer as a Ray actor: where it runs, and the threads its calls run in.

This file and ``group`` are the only ones of this room that know Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from runtime.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from runtime.trainer.operations import RankInfo

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where ranks run and how long they may take."""

    ranks: int = 1
    gpus_per_rank: float = 0.0
    host: str = LOOPBACK
    """Address of rank 0 for the rendezvous; loopback when all ranks share a host."""
    start_deadline_s: float = 300.0
    """From the first actor asked for to all ranks joined; stretched, as engines load beside it."""
    call_deadline_s: float = 3600.0
    """Of one call, an update included; collectives inside have the run's distributed timeout."""
    env: Mapping[str, str] | None = None
    options: Callable[[int], Mapping[str, Any]] = lambda _: {}
    """Options of a rank's actor: which node it belongs on."""


def make_actor(
    settings: TrainerSettings,
    placement: Placement,
    rank: int,
    epoch: int,
    on_start: Callable[[], object] | None,
) -> Any:
    """Ask Ray for the actor of one rank; its handle comes before the actor runs.

    It is never restarted, and no call of it repeated, by Ray itself.
    """
    threads = str(settings.threads)
    env = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"GLOO_SOCKET_IFNAME": "lo"} if placement.host == LOOPBACK else {}),
        # As SGLang sets it: the two sides of one communicator map memory in the same way.
        **({"NCCL_CUMEM_ENABLE": "0"} if placement.gpus_per_rank else {}),
        **(placement.env or {}),
    }
    groups = {"step": 1, "write": 1, "watch": 1, "aside": 1}
    decorate: Any = ray.remote  # its overloads know no options for classes
    actor_class = decorate(concurrency_groups=groups)(_RankActor).options(
        num_cpus=0,
        num_gpus=placement.gpus_per_rank,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": env},
        **placement.options(rank),
    )
    return actor_class.remote(settings, rank, placement.ranks, epoch, on_start)


class _RankActor:
    """A RankServer in an actor: a thread for steps, one for writing, one that waits, one aside."""

    def __init__(
        self,
        settings: TrainerSettings,
        rank: int,
        size: int,
        epoch: int,
        on_start: Callable[[], object] | None,
    ) -> None:
        from runtime.trainer.rank import RankServer

        self._server = RankServer(settings, rank=rank, size=size, epoch=epoch, on_start=on_start)

    def info(self) -> RankInfo:
        return self._server.info()

    def listen(self, host: str, timeout_s: float) -> int:
        return self._server.listen(host, timeout_s)

    @ray.method(concurrency_group="step")
    def join(self, host: str, port: int, timeout_s: float) -> None:
        self._server.join(host, port, timeout_s)

    @ray.method(concurrency_group="step")
    def step(self, operation: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._server.step(operation, method, *args, **kwargs)

    @ray.method(concurrency_group="write")
    def write_staged(self, operation: Any, token: str, folder: str) -> dict[str, str]:
        return self._server.write_staged(operation, token, folder)

    @ray.method(concurrency_group="aside")
    def free_port(self, host: str) -> int:
        return self._server.free_port(host)

    @ray.method(concurrency_group="aside")
    def abort_broadcast(self) -> None:
        self._server.abort_broadcast()

    @ray.method(concurrency_group="watch")
    def stay(self) -> None:
        self._server.stay()

    def stop(self) -> None:
        self._server.stop()
