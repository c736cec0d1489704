"""Engine slots as Ray actors: one actor is one incarnation, and its death is the engine's death."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from runtime.engines.protocol import EngineAddress, EngineOwner
from runtime.errors import EngineDead, WaitTimeout


class EngineActor:
    """Runs inside Ray: owns one engine server and ends with the attempt's guard.

    A plain class (Ray refuses to subclass actor classes); ``RaySlot`` wraps it.
    """

    def __init__(self, owner: EngineOwner, attempt_dir: str, epoch: int) -> None:
        from runtime.session import deadman

        self._owner = owner
        deadman.watch(attempt_dir, epoch=epoch, on_lost=owner.stop)

    def start(self) -> EngineAddress:
        """Start the server; see ``EngineOwner.start``."""
        return self._owner.start()

    def is_running(self) -> bool:
        """The server exists."""
        return self._owner.is_running()

    def stop(self) -> None:
        """End the server. Idempotent."""
        self._owner.stop()


@dataclass(slots=True, kw_only=True)
class RaySlot:
    """One engine slot over its incarnations; implements ``runtime.engines.pool.SlotRunner``."""

    owner: EngineOwner
    """Not started here: it travels into the actor."""
    attempt_dir: str
    epoch: int
    start_deadline_s: float
    stop_deadline_s: float = 10.0
    num_gpus: float = 0
    _actor: Any = field(default=None, init=False)

    async def start(self) -> EngineAddress:
        """Start a new incarnation in a new actor.

        Raises:
            WaitTimeout: if the server does not answer within ``start_deadline_s``.
            EngineDead: if the actor died while starting.
        """
        import ray
        from ray.exceptions import RayActorError

        await self.stop()
        actor_class = ray.remote(
            num_cpus=0,
            num_gpus=self.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
        )(EngineActor)
        self._actor = actor_class.remote(self.owner, self.attempt_dir, self.epoch)
        try:
            with anyio.fail_after(self.start_deadline_s):
                return await self._actor.start.remote()
        except TimeoutError as error:
            await self.stop()
            raise WaitTimeout(
                f"engine server did not answer within {self.start_deadline_s:g} s of its start",
                deadline_s=self.start_deadline_s,
            ) from error
        except RayActorError as error:
            self._actor = None
            raise EngineDead(f"engine actor died while starting: {error}") from error

    async def is_running(self) -> bool:
        """The actor answers and its server exists; False when either is gone."""
        from ray.exceptions import RayActorError

        if self._actor is None:
            return False
        try:
            with anyio.fail_after(self.stop_deadline_s):
                return await self._actor.is_running.remote()
        except (RayActorError, TimeoutError):
            return False

    async def stop(self) -> None:
        """End the server and its actor; the actor is killed when it does not answer. Idempotent."""
        import ray
        from ray.exceptions import RayActorError

        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            with anyio.move_on_after(self.stop_deadline_s, shield=True):
                await actor.stop.remote()
        except RayActorError:
            return  # already dead: that is what was wanted
        finally:
            ray.kill(actor)
