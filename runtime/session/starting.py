"""Ray and the trainer's ranks, started beside everything that can do without them.

Both load much and wait little, as do the preparation and the engines' servers: the preparation
needs neither, the engines need Ray alone.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from runtime.errors import SessionLost
from runtime.session.cluster import SessionRay, take_signals_back
from runtime.session.ground import Ground
from runtime.session.member import join_attempt
from runtime.telemetry.timing import Stage
from runtime.trainer.actor import Placement
from runtime.trainer.group import TrainerGroup
from runtime.trainer.settings import from_spec

_LEAVE_S = 60.0
"""For a start that was given up to be over: Ray lets go of who waits for it, actors are killed."""


class TrainerStart:
    """Starts Ray, then the ranks, in the background of its block; ends the trainer with it."""

    def __init__(self, ground: Ground, own_ray: SessionRay) -> None:
        """Prepare; nothing is started yet.

        Args:
            ground: of the session; its task group does the work.
            own_ray: started first; ended by others, but for a start that is given up.
        """
        self._ground = ground
        self._ray = own_ray
        self._scope = anyio.CancelScope()
        self._ray_is_up = anyio.Event()
        self._over = anyio.Event()
        self._trainer: TrainerGroup | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        self._ground.tasks.start_soon(self._run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.shutdown()

    async def ray_is_up(self) -> None:
        """Wait for Ray; what goes wrong is said by ``trainer``."""
        await self._ray_is_up.wait()

    async def trainer(self) -> TrainerGroup:
        """Wait for the ranks.

        Raises:
            SessionError: if Ray or the ranks did not come up, or the start was given up.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error
        if self._trainer is None:
            raise SessionLost("the trainer's start was given up")
        return self._trainer

    async def shutdown(self) -> None:
        """End the trainer, or give its start up, and Ray's with it. Idempotent."""
        self._scope.cancel()
        if not (self._ray_is_up.is_set() or self._over.is_set()):
            # A thread waits there, which no cancellation reaches.
            await anyio.to_thread.run_sync(self._ray.stop)
        with anyio.move_on_after(_LEAVE_S):
            await self._over.wait()
        if self._trainer is not None:
            await self._trainer.shutdown()

    async def _run(self) -> None:
        try:
            with self._scope:
                await anyio.to_thread.run_sync(self._ray.start)
                take_signals_back()
                await anyio.lowlevel.checkpoint()  # the thread is waited for, cancelled or not
                self._ray_is_up.set()
                with self._ground.recorder.timing.stage(Stage.START_TRAINER):
                    self._trainer = await self._start()
        except Exception as error:  # told to who waits for the trainer, and nobody else
            # Whoever gave the start up is told nothing of how it ended.
            if not self._scope.cancel_called:
                self._error = error
        finally:
            self._over.set()

    async def _start(self) -> TrainerGroup:
        context, nodes = self._ground.context, self._ray.nodes
        spec, topology = context.spec, context.plan.topology
        ranks = topology.trainer_ranks
        return await TrainerGroup.start(
            from_spec(
                spec.core,
                spec.rollout,
                dtype=spec.model.dtype,
                seed=spec.seed,
                lora=spec.lora,
                teacher=spec.teacher,
            ),
            Placement(
                ranks=ranks,
                gpus_per_rank=topology.gpus_per_rank,
                host=nodes.address(nodes.trainer_node(0, ranks)),
                options=lambda rank: nodes.options(nodes.trainer_node(rank, ranks)),
            ),
            epoch=context.epoch,
            on_start=partial(join_attempt, str(context.attempt.path), epoch=context.epoch),
        )
