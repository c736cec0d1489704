"""A session made of its parts, with everything that runs beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import anyio

from runtime.checkpoints.uploads import Uploads
from runtime.data.samples import PromptId
from runtime.evaluation.background import BackgroundEvaluator
from runtime.rollout.producer import Producer
from runtime.session.books import Books
from runtime.session.committing import make_committer, make_uploads
from runtime.session.context import Context
from runtime.session.ends import EndRules
from runtime.session.exporting import SessionExporter
from runtime.session.ground import Ground
from runtime.session.holding import ServingHold
from runtime.session.nodes import Nodes
from runtime.session.parts import Parts, SetEvaluator
from runtime.session.preparing import Prepared
from runtime.session.probing import AgreementProbe
from runtime.session.publishing import Publishing
from runtime.session.restoring import Standing, stand
from runtime.session.retrying import StepRetries
from runtime.session.sequence import Session
from runtime.session.serving import (
    Engines,
    make_background_evaluator,
    make_evaluator,
    make_producer,
    make_verifiers,
    sampling_settings,
)
from runtime.session.teaching import open_teacher
from runtime.session.weights import make_publishing
from runtime.trainer.group import TrainerGroup


@asynccontextmanager
async def running(
    ground: Ground,
    prepared: Prepared,
    engines: Engines,
    trainer: TrainerGroup,
    facts: Mapping[str, object],
    nodes: Nodes,
) -> AsyncGenerator[Session, None]:
    """Restore, wire the parts, start what runs beside the session; end it in reverse.

    Args:
        ground: of the session.
        prepared: model and prompts.
        engines: started.
        trainer: with the initial model.
        facts: about the model, as the trainer told them.
        nodes: of the attempt.
    """
    standing = await stand(ground, prepared, trainer)
    publishing = make_publishing(ground, engines, trainer, nodes)
    uploads = make_uploads(ground, standing)
    spec, run_file = ground.context.spec, ground.context.plan.run_file
    vocab_size = cast(int, facts["vocab_size"])
    some_text = standing.stores[""].prompt(PromptId(0, 0)).text
    async with (
        make_verifiers(spec, run_file, standing.stores) as verifiers,
        open_teacher(spec, prepared, vocab_size=vocab_size, prompt=some_text) as teacher,
    ):
        producer = make_producer(
            ground.context,
            engines,
            standing.ledger,
            standing.stores,
            verifiers,
            ground.recorder,
            vocab_size=vocab_size,
            teacher=teacher,
            next_collection=standing.update // spec.core.updates_per_collection + 1,
            decode_folder=prepared.tokenizer,
        )
        background = _background(ground, prepared, trainer, standing)
        evaluator = background or make_evaluator(
            ground.context, engines, prepared, standing.stores, verifiers, ground.recorder
        )
        parts = _parts(
            ground, prepared, engines, trainer, standing, publishing, uploads, producer, evaluator
        )
        session = Session(parts, _rules(ground.context, standing), update=standing.update)
        async with anyio.create_task_group() as tasks:
            await tasks.start(engines.monitor.run)
            await tasks.start(producer.run)
            tasks.start_soon(trainer.watch)
            tasks.start_soon(publishing.mend_for_ever)
            tasks.start_soon(session.watch_for_ever)
            tasks.start_soon(ground.recorder.sampler(producer.occupancy).run)
            if background is not None:
                tasks.start_soon(background.land_for_ever)
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


def _background(
    ground: Ground, prepared: Prepared, trainer: TrainerGroup, standing: Standing
) -> BackgroundEvaluator | None:
    """None where evaluation has the engines of training for a while."""
    if ground.context.spec.evaluation.mode != "background":
        return None
    return make_background_evaluator(
        ground.context,
        prepared,
        standing.stores,
        ground.recorder,
        source=trainer,
        tasks=ground.tasks,
    )


def _parts(
    ground: Ground,
    prepared: Prepared,
    engines: Engines,
    trainer: TrainerGroup,
    standing: Standing,
    publishing: Publishing,
    uploads: Uploads | None,
    producer: Producer,
    evaluator: SetEvaluator,
) -> Parts:
    context, spec = ground.context, ground.context.spec
    books = Books(context=context, recorder=ground.recorder, view=ground.view, tasks=ground.tasks)
    return Parts(
        context=context,
        prepared=prepared,
        restored=standing.found is not None,
        trainer=trainer,
        ledger=standing.ledger,
        producer=producer,
        publishing=publishing,
        commits=make_committer(ground, standing, trainer, books, uploads),
        copies=uploads,
        evaluator=evaluator,
        probe=AgreementProbe(
            pool=engines.pool,
            trainer=trainer,
            prompt=standing.stores[""].prompt,
            num_prompts=len(standing.stores[""]),
            sampling=sampling_settings(spec),
            limit=spec.core.mean_logprob_gap(spec.model.dtype),
            deadline_s=spec.rollout.waiting_deadline + spec.rollout.running_deadline,
        ),
        exporter=SessionExporter(
            context=context, prepared=prepared, trainer=trainer, lifecycle=ground.recorder.lifecycle
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
        recorder=ground.recorder,
    )


def _rules(context: Context, standing: Standing) -> EndRules:
    core = context.spec.core
    groups = context.spec.rollout.groups_per_collection
    return EndRules(
        max_updates=context.plan.schedule.updates,
        data_updates=-(-standing.order.total // groups) * core.updates_per_collection,
        max_run_seconds=core.max_run_seconds,
        debug_exit_after=core.debug_exit_after,
        first_update=standing.update,
    )
