"""A session put together: prepared data, Ray, trainer, engines, restored state, all parts."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from runtime.launch.group import GROUP_ADDRESS
from runtime.rundir.processes import owned_environment
from runtime.session.cluster import LocalRay, SessionRay
from runtime.session.context import Context
from runtime.session.ground import Ground
from runtime.session.headed import HeadRay
from runtime.session.joined import JoinedRay, job_address
from runtime.session.preparing import Prepared, prepare
from runtime.session.running import running
from runtime.session.sequence import Session
from runtime.session.serving import (
    Engines,
    make_engines,
)
from runtime.session.starting import TrainerStart
from runtime.telemetry.events import Event
from runtime.telemetry.timing import Stage
from runtime.trainer.group import TrainerGroup


@asynccontextmanager
async def session_of(ground: Ground) -> AsyncGenerator[Session, None]:
    """Bring everything up, yield the session, take everything down.

    Raises:
        ConfigError: if the run, its model or its data cannot be used, or differ from the commit's.
        SessionError: if a process did not come up; a new epoch may.
    """
    context = ground.context
    own_ray = _ray_of(ground)
    try:
        async with TrainerStart(ground, own_ray) as start:
            prepared = await _prepare_beside(ground, start)
            nodes = own_ray.nodes
            ground.recorder.lifecycle.record(Event.RUN_PREPARED, fingerprint=prepared.fingerprint)
            async with nodes.watched(ground.tasks):
                if ground.caches is not None:
                    # Before anything is compiled; the processes know the folder since they started.
                    await ground.caches.restore(Path(prepared.model), nodes)
                scratch = ground.scratch
                engines = make_engines(context, prepared, ground.recorder, nodes, scratch=scratch)
                try:
                    trainer, facts = await _load_and_start(ground, prepared, engines, start)
                    async with running(ground, prepared, engines, trainer, facts, nodes) as session:
                        yield session
                finally:
                    with anyio.CancelScope(shield=True):
                        await start.shutdown()
                        await engines.monitor.stop()
        if ground.caches is not None and nodes.nodes:
            # Other nodes are reached while Ray is up; one that is lost now costs its cache alone.
            ground.view.doing("cache")
            await ground.caches.gather(lambda: ground.signals.is_terminated)
    except Exception:
        # What broke first may only be the first sign of a lost node.
        await own_ray.nodes.settle()
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(own_ray.stop)


def _ray_of(ground: Ground) -> SessionRay:
    context = ground.context
    if context.order.ray == "own":
        return LocalRay(ground.scratch, num_gpus=context.plan.topology.gpus_per_replica)
    env = owned_environment(_code(context), attempt_dir=context.attempt.path, epoch=context.epoch)
    if ground.caches is not None:
        env |= ground.caches.environment
    deadline_s = context.spec.launch.synchronized_start_timeout
    if context.order.ray == "job":
        return JoinedRay(
            context.plan.topology,
            address=job_address(),
            env=env,
            placement_deadline_s=deadline_s,
        )
    return HeadRay(
        context.plan.topology,
        address=os.environ[GROUP_ADDRESS],
        env=env,
        placement_deadline_s=deadline_s,
        attempt=context.attempt,
        epoch=context.epoch,
        scratch=ground.scratch,
    )


def _code(context: Context) -> dict[str, str]:
    """Where processes on other nodes find the code, if it travelled with the job."""
    code = context.attempt.code
    return {"PYTHONPATH": str(code)} if code.is_dir() else {}


async def _prepare_beside(ground: Ground, start: TrainerStart) -> Prepared:
    """Prepare in a process of its own while Ray and the trainer's ranks start: all import much.

    Returns once Ray is up too; the ranks may still be on their way. Whatever fails first ends the
    wait for the others.
    """
    made: list[Prepared] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start.trainer)
        with ground.recorder.timing.stage(Stage.PREPARE):
            made.append(await prepare(ground.context.attempt))
        await start.ray_is_up()
        tasks.cancel_scope.cancel()
    return made[0]


async def _load_and_start(
    ground: Ground, prepared: Prepared, engines: Engines, start: TrainerStart
) -> tuple[TrainerGroup, dict[str, object]]:
    """The model into the trainer, the engines beside it; facts about the model."""
    loaded: list[tuple[TrainerGroup, dict[str, object]]] = []
    ground.view.doing("rendezvous")

    async def load() -> None:
        trainer = await start.trainer()
        loaded.append((trainer, await trainer.load(prepared.model)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        with ground.recorder.timing.stage(Stage.START_ENGINES):
            await engines.monitor.start_engines()
    trainer, facts = loaded[0]
    ground.recorder.lifecycle.record(Event.TRAINER_STARTED, facts=facts)
    return trainer, facts
