"""Engine slots as Ray actors: one actor is one incarnation, and its death is the engine's death."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from runtime.engines.protocol import EngineAddress, EngineOwner
from runtime.errors import EngineDead, RunError, WaitTimeout


class EngineActor:
    """Runs inside Ray: owns one engine server and ends with the attempt's guard.

    A plain class (Ray refuses to subclass actor classes); ``RaySlot`` wraps it.
    """

    def __init__(self, owner: EngineOwner, attempt_dir: str, epoch: int) -> None:
        from runtime.session.member import join_attempt

        self._owner = owner
        join_attempt(attempt_dir, epoch=epoch, on_lost=owner.stop)

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
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More options of the actor: which node it belongs on."""
    _actor: Any = field(default=None, init=False)

    async def start(self) -> EngineAddress:
        """Start a new incarnation in a new actor.

        Raises:
            WaitTimeout: if the server does not answer within ``start_deadline_s``.
            EngineDead: if the server or its actor died while starting.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        await self.stop()
        decorate: Any = ray.remote  # its overloads know no options for classes
        actor_class = decorate(
            num_cpus=0,
            num_gpus=self.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            **self.options,
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
        except RayTaskError as error:
            await self.stop()
            # The owner's own error, as it was raised: Ray hands it over inside one of its own.
            cause: BaseException = error.cause
            raise (cause if isinstance(cause, RunError) else EngineDead(str(cause))) from error
        except RayError as error:
            await self.stop()
            raise EngineDead(f"engine actor died while starting: {error}") from error

    async def is_running(self) -> bool:
        """The actor answers and its server exists; False when either is gone."""
        from ray.exceptions import RayError

        if self._actor is None:
            return False
        try:
            with anyio.fail_after(self.stop_deadline_s):
                return await self._actor.is_running.remote()
        except (RayError, TimeoutError):
            # Not only the actor's death: without its raylet the engine is gone too.
            return False

    async def stop(self) -> None:
        """End the server and its actor; the actor is killed when it does not answer. Idempotent."""
        import ray
        from ray.exceptions import RayError

        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            with anyio.move_on_after(self.stop_deadline_s, shield=True):
                await actor.stop.remote()
        except RayError:
            return  # already dead: that is what was wanted
        finally:
            with contextlib.suppress(RayError):
                ray.kill(actor)
