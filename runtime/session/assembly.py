"""A session put together: prepared data, Ray, trainer, engines, restored state, all parts."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.commit import Committer
from runtime.checkpoints.identity import RunIdentity, differences
from runtime.checkpoints.resume import Restorable, check_restored, find_restorable
from runtime.checkpoints.retention import retain
from runtime.checkpoints.upload import Uploads
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.segments import LedgerSegment
from runtime.errors import ConfigError, SessionLost
from runtime.evaluation.snapshots import pinned_policies
from runtime.launch.group import GROUP_ADDRESS
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.disk import DiskTransport
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import PublicationTransport
from runtime.publication.transaction import Publisher
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import owned_environment
from runtime.rundir.records import CommitRecord
from runtime.session.books import Books
from runtime.session.caching import SessionCaches
from runtime.session.cluster import LocalRay, SessionRay, take_signals_back
from runtime.session.context import Context
from runtime.session.ends import EndRules
from runtime.session.exporting import SessionExporter
from runtime.session.headed import HeadRay
from runtime.session.holding import ServingHold
from runtime.session.joined import JoinedRay, job_address
from runtime.session.member import join_attempt
from runtime.session.nodes import Nodes
from runtime.session.parts import Parts
from runtime.session.preparing import Prepared, prepare
from runtime.session.probing import AgreementProbe
from runtime.session.publishing import Publishing, publication_limits
from runtime.session.retrying import StepRetries
from runtime.session.sequence import Session
from runtime.session.serving import (
    Engines,
    drain_deadline_s,
    make_background_evaluator,
    make_engines,
    make_evaluator,
    make_producer,
    make_verifiers,
    open_stores,
    sampling_settings,
)
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from runtime.telemetry.events import Event
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.timing import Stage
from runtime.trainer.group import Placement, TrainerGroup
from runtime.trainer.settings import from_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What stands before any process is started."""

    context: Context
    scratch: Path
    """Short folder on local disk for Ray's sockets and logs."""
    recorder: Recorder
    view: SessionView
    signals: Signals
    tasks: TaskGroup
    """Of the whole session: whatever fails in it ends the session."""
    caches: SessionCaches | None = None
    """None where no archive of compiler caches is kept."""


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
        prepared, trainer = await _prepare_beside(ground, own_ray)
        nodes = own_ray.nodes
        ground.tasks.start_soon(nodes.watch)
        ground.recorder.lifecycle.record(Event.RUN_PREPARED, fingerprint=prepared.fingerprint)
        if ground.caches is not None:
            # Before anything is compiled; the processes know the folder since they started.
            await ground.caches.restore(Path(prepared.model))
        engines = make_engines(context, prepared, ground.recorder, nodes, scratch=ground.scratch)
        try:
            facts = await _load_and_start(ground, prepared, engines, trainer)
            async with _session(ground, prepared, engines, trainer, facts, nodes) as session:
                yield session
        finally:
            with anyio.CancelScope(shield=True):
                await trainer.shutdown()
                await engines.monitor.stop()
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


async def _prepare_beside(ground: Ground, own_ray: SessionRay) -> tuple[Prepared, TrainerGroup]:
    """Prepare in a process of its own while Ray and the trainer's ranks start: all import much."""
    context, timing = ground.context, ground.recorder.timing
    spec = context.spec
    made: list[Prepared] = []
    started: list[TrainerGroup] = []

    async def start_trainer() -> None:
        await anyio.to_thread.run_sync(own_ray.start)
        nodes, ranks = own_ray.nodes, context.plan.topology.trainer_ranks
        take_signals_back()
        with timing.stage(Stage.START_TRAINER):
            trainer = await TrainerGroup.start(
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
                    gpus_per_rank=context.plan.topology.gpus_per_rank,
                    host=nodes.address(nodes.trainer_node(0, ranks)),
                    options=lambda rank: nodes.options(nodes.trainer_node(rank, ranks)),
                ),
                epoch=context.epoch,
                on_start=partial(join_attempt, str(context.attempt.path), epoch=context.epoch),
            )
        started.append(trainer)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start_trainer)
        with timing.stage(Stage.PREPARE):
            made.append(await prepare(context.attempt))
    return made[0], started[0]


async def _load_and_start(
    ground: Ground, prepared: Prepared, engines: Engines, trainer: TrainerGroup
) -> dict[str, object]:
    """The model into the trainer, the engines beside it; facts about the model."""
    facts: dict[str, object] = {}
    ground.view.doing("rendezvous")

    async def load() -> None:
        facts.update(await trainer.load(prepared.model))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load)
        with ground.recorder.timing.stage(Stage.START_ENGINES):
            await engines.monitor.start_engines()
    ground.recorder.lifecycle.record(Event.TRAINER_STARTED, facts=facts)
    return facts


@asynccontextmanager
async def _session(
    ground: Ground,
    prepared: Prepared,
    engines: Engines,
    trainer: TrainerGroup,
    facts: dict[str, object],
    nodes: Nodes,
) -> AsyncGenerator[Session, None]:
    context, recorder = ground.context, ground.recorder
    spec = context.spec
    identity = RunIdentity(
        training_digest=context.order.training_digest,
        layout={
            "trainer_ranks": context.plan.topology.trainer_ranks,
            "engines": spec.rollout.engines,
        },
        data_fingerprint=prepared.fingerprint,
    )
    stores = open_stores(prepared)
    found = await anyio.to_thread.run_sync(_find, context, identity)
    order = PromptOrder(
        len(stores[""]), epochs=spec.data.epochs, seed=spec.seed, shuffle=spec.data.shuffle
    )
    ledger = Ledger(order) if found is None else Ledger.restore(found.segments, order)
    update = 0
    if found is not None:
        with recorder.timing.stage(Stage.RESTORE):
            update = await _restore(trainer, found)
        recorder.lifecycle.record(
            Event.CHECKPOINT_RESTORED, update=update, policy=found.commit.policy
        )
    ground.view.update = update

    async def committed(record: CommitRecord, segment: LedgerSegment) -> None:
        ledger.committed(segment)
        ground.view.moved(f"commit {record.update}")
        recorder.lifecycle.record(
            Event.CHECKPOINT_COMMITTED, update=record.update, policy=record.policy
        )
        if uploads is not None:
            uploads.committed(record)
        for name in await anyio.to_thread.run_sync(
            _retain,
            context.root,
            context.epoch,
            spec.checkpoint.keep,
            frozenset() if uploads is None else uploads.pinned,
        ):
            recorder.lifecycle.record(Event.CHECKPOINT_DELETED, folder=name)

    uploads = (
        None
        if spec.checkpoint.upload is None
        else Uploads(
            context.root,
            Bucket.of(spec.checkpoint.upload),
            keep=spec.checkpoint.keep,
            record=recorder.lifecycle.record,
        )
    )

    async def kill(slot: int, incarnation: str, reason: str) -> None:
        await engines.monitor.kill(slot, incarnation, reason)

    publishing = Publishing(
        publisher=Publisher(
            transport=_transport(context, trainer, nodes),
            kill=kill,
            record_path=context.root.path / "publications.jsonl",
            limits=publication_limits(
                spec.rollout.drain_deadline,
                None if context.plan.memory is None else context.plan.memory.weights_bytes,
            ),
            pause=spec.core.refresh_pause,
            clock=context.clock,
        ),
        pool=engines.pool,
        monitor=engines.monitor,
        gate=engines.gate,
        mode=spec.core.publication_mode,
        drain_deadline_s=drain_deadline_s(spec),
        lifecycle=recorder.lifecycle,
        sleeps=spec.rollout.sleep,
    )
    async with make_verifiers(spec, context.plan.run_file, stores) as verifiers:
        producer = make_producer(
            context,
            engines,
            ledger,
            stores,
            verifiers,
            recorder,
            vocab_size=cast(int, facts["vocab_size"]),
            next_collection=update // spec.core.updates_per_collection + 1,
            decode_folder=prepared.tokenizer,
        )
        books = Books(context=context, recorder=recorder, view=ground.view, tasks=ground.tasks)
        background = None
        if spec.evaluation.mode == "background":
            background = make_background_evaluator(
                context, prepared, stores, recorder, source=trainer, tasks=ground.tasks
            )
        evaluator = background or make_evaluator(
            context, engines, prepared, stores, verifiers, recorder
        )
        parts = Parts(
            context=context,
            prepared=prepared,
            restored=found is not None,
            trainer=trainer,
            ledger=ledger,
            producer=producer,
            publishing=publishing,
            commits=Committer(
                root=context.root,
                epoch=context.epoch,
                identity=identity,
                source=trainer,
                tasks=ground.tasks,
                on_committed=committed,
                parent=None if found is None else found.commit,
                clock=context.clock,
                before_record=books.kept,
            ),
            evaluator=evaluator,
            probe=AgreementProbe(
                pool=engines.pool,
                trainer=trainer,
                prompt=stores[""].prompt,
                num_prompts=len(stores[""]),
                sampling=sampling_settings(spec),
                limit=spec.core.mean_logprob_gap(spec.model.dtype),
                deadline_s=spec.rollout.waiting_deadline + spec.rollout.running_deadline,
            ),
            exporter=SessionExporter(
                context=context, prepared=prepared, trainer=trainer, lifecycle=recorder.lifecycle
            ),
            steps=StepRetries(
                retries=spec.session.retries,
                backoff_s=spec.session.retry_backoff,
                detach_grace_s=spec.launch.detach_grace,
                signals=ground.signals,
                view=ground.view,
                effects=ServingHold(gate=engines.gate, monitor=engines.monitor),
                clock=context.clock,
            ),
            signals=ground.signals,
            view=ground.view,
            books=books,
            recorder=recorder,
        )
        session = Session(parts, _rules(context, order, update), update=update)
        async with anyio.create_task_group() as tasks:
            await tasks.start(engines.monitor.run)
            await tasks.start(producer.run)
            tasks.start_soon(trainer.watch)
            tasks.start_soon(publishing.mend_for_ever)
            tasks.start_soon(session.watch_for_ever)
            if background is not None:
                tasks.start_soon(background.land_for_ever)
            tasks.start_soon(recorder.sampler(producer.occupancy).run)
            if uploads is not None:
                tasks.start_soon(uploads.run)
            try:
                yield session
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await producer.close()
                    await publishing.publisher.close()
                    if uploads is not None:
                        await uploads.settle()


def _shared_scratch(context: Context, nodes: Nodes) -> Path | None:
    """Memory of this host where everything runs on it; else a folder that all nodes see."""
    if not nodes.nodes:
        return None
    folder = context.root.path / "scratch"
    folder.mkdir(exist_ok=True)
    return folder


def _retain(root: RunRoot, epoch: int, keep: int, copying: Collection[str]) -> tuple[str, ...]:
    pinned = {*pinned_policies(root, Chain(root).read()), *copying}
    return retain(root, epoch, keep=keep, pinned=pinned)


def _transport(context: Context, trainer: TrainerGroup, nodes: Nodes) -> PublicationTransport:
    diagnostics = Diagnostics.from_environment()
    match context.plan.publication_transport:
        case "disk":
            root = _shared_scratch(context, nodes)
            return DiskTransport(trainer, root, diagnostics=diagnostics)
        case "ipc":
            return IpcTransport(trainer, diagnostics=diagnostics)
        case _:
            return BroadcastTransport(
                trainer,
                host=nodes.address(0),
                backend="nccl" if context.plan.topology.trainer_gpus else "gloo",
                ranks_per_engine=context.spec.rollout.tensor,
                diagnostics=diagnostics,
            )


def _rules(context: Context, order: PromptOrder, update: int) -> EndRules:
    core = context.spec.core
    groups = context.spec.rollout.groups_per_collection
    return EndRules(
        max_updates=context.plan.schedule.updates,
        data_updates=-(-order.total // groups) * core.updates_per_collection,
        max_run_seconds=core.max_run_seconds,
        debug_exit_after=core.debug_exit_after,
        first_update=update,
    )


def _find(context: Context, identity: RunIdentity) -> Restorable | None:
    """The commit to go on from; it must be the one the epoch record names."""
    records = Chain(context.root).check(context.epoch)
    epoch = history.newest_epoch(records)
    found = find_restorable(context.root, records)
    named = None if epoch is None else epoch.restored_seq
    if (None if found is None else found.commit.seq) != named:
        raise SessionLost(
            f"epoch {context.epoch} names record {named} as the commit it restores, but the newest "
            f"valid one is {None if found is None else found.commit.seq}: a new epoch names it"
        )
    if found is not None and (changed := differences(found.commit, identity)):
        raise ConfigError(
            f"this run cannot go on from {found.commit.folder}: {', '.join(changed)} changed. "
            "Put it back, or start another run",
            changed=list(changed),
        )
    return found


async def _restore(trainer: TrainerGroup, found: Restorable) -> int:
    if found.initial is not None:
        return 0  # commit 0 refers to the initial model, which is loaded already
    restored = await trainer.restore(str(found.folder))
    check_restored(restored, found.commit)
    return found.commit.update
