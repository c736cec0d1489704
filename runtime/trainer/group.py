"""The ranks of a trainer as one handle: every call goes to all of them (``actor``).

Every rank is called with the same sequence of operations. A rank that dies takes the trainer with
it: survivors are in a collective that can never end, so they are killed at once, and the next epoch
starts from the newest commit. Ray restarts and retries nothing by itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import anyio
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.errors import RunError, TrainerLost, WaitTimeout
from runtime.publication.protocol import ONLY_SHA256
from runtime.trainer.actor import Placement, make_actor
from runtime.trainer.operations import Operation, RankInfo
from runtime.trainer.protocol import Sequence, StagedState, TrainBatch, TrainMetrics
from runtime.trainer.settings import TrainerSettings
from runtime.waits import stretched

if TYPE_CHECKING:
    from runtime.publication.groups import GroupPlan
    from runtime.publication.told import Description, SharedWeights, WrittenSnapshot

_ASK_AGAIN_S = 1.0
_ASK_AGAIN_TIMES = 20
_BLAME_S = 2.0
"""How long to look for a dead rank after another one failed: its siblings see the broken collective
first, and must not be named for it."""


class TrainerGroup:
    """Implements TrainerHandle. Make it with ``start``, inside an initialised Ray."""

    def __init__(
        self, actors: list[Any], ranks: list[RankInfo], placement: Placement, epoch: int
    ) -> None:
        self._actors = actors
        self.ranks = ranks
        self._placement = placement
        self._epoch = epoch
        self._update = 0
        self._serials = itertools.count(1)
        self._turn = anyio.Lock()
        self._write_turn = anyio.Lock()
        self._lost: TrainerLost | None = None
        self._is_stopped = False

    @classmethod
    async def start(
        cls,
        settings: TrainerSettings,
        placement: Placement | None = None,
        *,
        epoch: int,
        on_start: Callable[[], object] | None = None,
    ) -> Self:
        """Start the actors and let them find one another.

        Args:
            settings: of the trainer.
            placement: None: one rank on this host.
            epoch: ownership epoch, part of every operation.
            on_start: a module-level callable (or ``partial`` of one) that each rank runs first.

        Raises:
            WaitTimeout: if the ranks are not joined in time; none is left behind.
            TrainerLost: if a rank dies on the way.
        """
        placement = placement or Placement()
        limit_s = stretched("readiness", placement.start_deadline_s)
        actors = [
            make_actor(settings, placement, rank, epoch, on_start)
            for rank in range(placement.ranks)
        ]
        group = cls(actors, [], placement, epoch)
        try:
            with anyio.fail_after(limit_s):
                await group._rendezvous(settings.distributed_timeout_s)
        except BaseException as exc:
            group._kill()
            if isinstance(exc, TimeoutError):
                raise WaitTimeout(
                    f"{placement.ranks} trainer rank(s) did not start and join within {limit_s:g} s"
                ) from exc
            raise
        return group

    async def _rendezvous(self, timeout_s: float) -> None:
        self.ranks = await self._all([a.info.remote() for a in self._actors], "start")
        if len(self._actors) > 1:
            host = self._placement.host
            (port,) = await self._all([self._actors[0].listen.remote(host, timeout_s)], "listen")
            await self._all([a.join.remote(host, port, timeout_s) for a in self._actors], "join")

    # The handle -------------------------------------------------------------------------------

    async def load(self, model_path: str) -> dict[str, object]:
        """See TrainerHandle."""
        self._update = 0
        return (await self._step("load", model_path))[0]

    async def score(
        self, sequences: tuple[Sequence, ...], *, temperature: float
    ) -> list[NDArray[np.float32]]:
        """See TrainerHandle."""
        return (await self._step("score", sequences, temperature=temperature))[0]

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See TrainerHandle. Metrics are equal on all ranks; rank 0's timings are reported."""
        # Put once: every rank on a host maps the same pages.
        metrics = (await self._step("train_step", ray.put(batch)))[0]
        self._update = batch.update
        return metrics

    async def weight_specs(self) -> list[TensorSpec]:
        """See TrainerHandle."""
        return (await self._step("weight_specs"))[0]

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """See TrainerHandle."""
        return (await self._step("write_snapshot", folder, kinds))[0]

    async def share_weights(
        self, place: int, folder: str, kinds: frozenset[WeightHash]
    ) -> SharedWeights:
        """Pack the current weights for engines of rank 0's machine (``publication.ipc``)."""
        return (await self._step("share_weights", place, folder, kinds))[0]

    async def write_adapter(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot:
        """See TrainerHandle."""
        return (await self._step("write_adapter", folder, kinds))[0]

    async def digest_base(
        self, kinds: frozenset[WeightHash]
    ) -> Mapping[WeightHash, Mapping[str, str]]:
        """See TrainerHandle."""
        return (await self._step("digest_base", kinds))[0]

    # What the broadcast transport needs (``publication.broadcast.BroadcastSource``).

    async def describe(self, kinds: frozenset[WeightHash] = ONLY_SHA256) -> Description:
        """Specs by bucket and digests of the current weights."""
        return (await self._step("describe", kinds))[0]

    async def free_port(self, host: str) -> int:
        """A free port where rank 0 runs."""
        return (await self._all([self._actors[0].free_port.remote(host)], "free_port"))[0]

    async def open_group(self, plan: GroupPlan, timeout_s: float) -> None:
        """Join as rank 0; returns when all have joined."""
        await self._step("open_group", plan, timeout_s)

    async def send_bucket(self, index: int, flat: bool = False, count: int = 1) -> None:
        """Broadcast ``count`` buckets from ``index`` on; returns when they are sent."""
        await self._step("send_bucket", index, flat, count)

    async def abort(self) -> None:
        """Leave the group; may be called while ``send_bucket`` runs, which then fails."""
        await self._all([actor.abort_broadcast.remote() for actor in self._actors], "abort")

    async def stage(self) -> Items[StagedState]:
        """See TrainerHandle."""
        return await self._step("stage")

    async def write_staged(self, staged: Items[StagedState], folder: str) -> Mapping[str, str]:
        """See TrainerHandle.

        A rank that cannot write (disk full) fails this call and nothing else: no collective runs in
        it, so its siblings are left alone.
        """
        async with self._write_turn:
            operation = self._operation("write_staged")
            calls = [
                _Call(actor, "write_staged", (operation, copy.token, folder))
                for actor, copy in zip(self._actors, staged, strict=True)
            ]
            written = await self._call(calls, "write_staged", is_collective=False)
        return {name: digest for part in written for name, digest in part.items()}

    async def restore(self, folder: str) -> dict[str, object]:
        """See TrainerHandle."""
        restored = (await self._step("restore", folder))[0]
        self._update = restored["update"]
        return restored

    async def watch(self) -> None:
        """See TrainerHandle."""
        refs = [actor.stay.remote() for actor in self._actors]
        try:
            await self._all(refs, "watch")
        except TrainerLost:
            if not self._is_stopped:
                raise

    async def shutdown(self) -> None:
        """See TrainerHandle. Ranks get 5 s to leave their group, then they are killed."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._lost is None:
            with anyio.move_on_after(5.0):
                # What stands in the way of a clean end is ended below.
                with contextlib.suppress(RunError):
                    await self._all([actor.stop.remote() for actor in self._actors], "stop")
        self._kill()

    # Calls ------------------------------------------------------------------------------------

    def _operation(self, name: str) -> Any:
        serial = next(self._serials)
        return Operation(epoch=self._epoch, update=self._update, name=name, serial=serial)

    async def _step(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        async with self._turn:
            operation = self._operation(method)
            calls = [
                _Call(actor, "step", (operation, method, *args), kwargs) for actor in self._actors
            ]
            return await self._call(calls, method, is_collective=True)

    async def _call(self, calls: list[_Call], name: str, *, is_collective: bool) -> list[Any]:
        if self._lost is not None:
            raise self._lost
        try:
            with anyio.fail_after(self._placement.call_deadline_s):
                return await self._all(calls, name, is_collective=is_collective)
        except TimeoutError as exc:
            limit = self._placement.call_deadline_s
            raise self._lose(f"{name} did not end within {limit:g} s", None) from exc

    async def _all(self, calls: Items[Any], name: str, *, is_collective: bool = True) -> list[Any]:
        """Await one call per rank; the first failure of a collective ends the wait for the rest."""
        results: list[Any] = [None] * len(calls)
        errors: dict[int, Exception] = {}
        answered: set[int] = set()

        def some_may_hang() -> bool:
            return is_collective and len(errors) + len(answered) < len(calls)

        async with anyio.create_task_group() as tasks:

            async def one(rank: int, call: Any) -> None:
                try:
                    results[rank] = await _answer(call)
                    answered.add(rank)
                except (RayError, RunError) as exc:
                    errors[rank] = exc
                    if not is_collective:
                        return
                    if some_may_hang() and not isinstance(exc, ActorDiedError):
                        await anyio.sleep(_BLAME_S)
                    tasks.cancel_scope.cancel()

            for rank, call in enumerate(calls):
                tasks.start_soon(one, rank, call)
        if errors:
            raise self._verdict(errors, name, must_end=some_may_hang())
        return results

    def _verdict(self, errors: dict[int, Exception], name: str, *, must_end: bool) -> Exception:
        """What the caller is told, after the siblings of a lost rank were killed.

        An error that Milepost raised is passed on as it is. ``must_end``: ranks that neither failed
        nor answered are in a collective that never ends, so they go all the same.
        """
        dead = [r for r, e in errors.items() if isinstance(e, ActorDiedError)]
        if not dead:
            for error in errors.values():
                cause = error.cause if isinstance(error, RayTaskError) else error
                if isinstance(cause, RunError):
                    if must_end:
                        self._lose(f"{name}: {cause.message}", next(iter(errors)))
                    return cause
        rank = dead[0] if dead else next(iter(errors))
        return self._lose(f"{name}: {_last_line(errors[rank])}", rank)

    def _lose(self, what: str, rank: int | None) -> TrainerLost:
        self._kill()
        place = next((i for i in self.ranks if i.rank == rank), None)
        host = place.host if place else "unknown host"
        who = "a trainer rank" if rank is None else f"trainer rank {rank} on {host}"
        self._lost = TrainerLost(
            f"{who} is lost after update {self._update} ({what}); its siblings were killed",
            rank=rank,
            host=host,
            pid=place.pid if place else None,
            last_update=self._update,
        )
        return self._lost

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that can be made again."""

    actor: Any
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None = None

    def make(self) -> Any:
        return getattr(self.actor, self.method).remote(*self.args, **(self.kwargs or {}))


async def _answer(call: Any) -> Any:
    """Await a call; one whose connection broke is asked again, since it may have run or not."""
    if not isinstance(call, _Call):
        return await call
    for _ in range(_ASK_AGAIN_TIMES):
        try:
            return await call.make()
        except ActorUnavailableError:
            await anyio.sleep(_ASK_AGAIN_S)
    return await call.make()


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip().split(". ")[0][:300]
