"""The serving side of a session, from the run file: engines, gate, verifiers, producer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from anyio.abc import TaskGroup

from configs.concurrency import settle_concurrency
from configs.run import RunSpec
from configs.shape import read_shape
from runtime.data.decoder import load_decoder
from runtime.data.frozen import PromptStore, open_frozen
from runtime.data.ledger import Ledger
from runtime.data.routed import RouterShape
from runtime.data.samples import Sample
from runtime.engines.client import HttpEngineClient
from runtime.engines.factory import engine_owner
from runtime.engines.health import health_settings
from runtime.engines.monitor import HealthMonitor
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, SamplingSettings
from runtime.engines.ray_owner import RaySlot
from runtime.evaluation.background import BackgroundEvaluator
from runtime.evaluation.evaluator import Evaluator
from runtime.evaluation.opening import Asker, evaluation_limits, frozen_set
from runtime.evaluation.shared import FrozenSet, SharedRunner
from runtime.publication.disk import WeightSource
from runtime.rewards.budget import SkipBudget
from runtime.rewards.shaping import overlong_penalty
from runtime.rewards.verifiers import VerifierSpec
from runtime.rewards.workers import VerifierPool
from runtime.rollout.errors_log import ErrorsLog
from runtime.rollout.filters import equal_rewards
from runtime.rollout.functions import SingleTurn
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.parts import ProducerParts, Teacher
from runtime.rollout.producer import Producer
from runtime.rollout.settings import ProducerSettings, drain_deadline_s
from runtime.rollout.stop_rule import StopRule
from runtime.session.context import Context
from runtime.session.nodes import Nodes
from runtime.session.preparing import Prepared
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.protocol import Axis
from runtime.telemetry.recorder import Recorder
from runtime.waits import stretched


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engine group: states, monitor, and the gate in front of it."""

    pool: EnginePool
    monitor: HealthMonitor
    gate: AdmissionGate


def make_engines(
    context: Context,
    prepared: Prepared,
    recorder: Recorder,
    nodes: Nodes | None = None,
    *,
    scratch: Path | None = None,
) -> Engines:
    """Slots of the run file, on their nodes; nothing is started yet.

    Args:
        context: of the session.
        prepared: the model to serve.
        recorder: hears what becomes of engines and gate.
        nodes: of the attempt; None: this host.
        scratch: a short folder on local disk for what a server keeps while it lives; None: the
            temporary folder.
    """
    nodes = nodes or Nodes()
    spec, clock = context.spec, context.clock
    # On one host the ports stay on loopback; the token keeps everybody else out all the same.
    api_key = secrets.token_hex(16)

    def connect(address: EngineAddress) -> HttpEngineClient:
        return HttpEngineClient(address.url, api_key=api_key)

    pool = EnginePool(spec.rollout.engines, clock=clock)
    runners = {
        slot: RaySlot(
            owner=engine_owner(
                spec,
                model=prepared.model,
                slot=slot,
                api_key=api_key,
                log_path=context.attempt.path / f"engine-{slot}.log",
                threads=context.threads,
                host=nodes.address(nodes.engine_node(slot)),
                scratch=scratch,
            ),
            attempt_dir=str(context.attempt.path),
            epoch=context.epoch,
            # The owner's own deadline comes first: it knows the server's last words.
            start_deadline_s=stretched("readiness", spec.rollout.engine_start_deadline) + 30.0,
            num_gpus=context.plan.topology.gpus_per_engine,
            options=nodes.options(nodes.engine_node(slot)),
        )
        for slot in range(spec.rollout.engines)
    }
    monitor = HealthMonitor(
        pool, runners, health_settings(spec.health), connect=connect, clock=clock
    )
    gate = AdmissionGate(clock=clock)
    pool.listen(recorder.lifecycle.heard)
    gate.listen(recorder.lifecycle.heard)
    return Engines(pool=pool, monitor=monitor, gate=gate)


def make_verifiers(
    spec: RunSpec, run_file: Path, stores: Mapping[str, PromptStore]
) -> VerifierPool:
    """Workers for every verifier that the prompts name; an async context manager.

    Args:
        spec: the run file.
        run_file: where it lies: verifiers by import path are looked for beside it first.
        stores: the prompts.
    """
    reward = spec.reward
    names = sorted({name for store in stores.values() for name in store.facts.verifiers})
    return VerifierPool(
        [
            VerifierSpec(
                name=name,
                arguments=dict(reward.arguments) if name == reward.verifier else {},
                batched=reward.batched and name == reward.verifier,
            )
            for name in names
        ],
        workers=reward.workers,
        time_limit_s=reward.time_limit,
        search_paths=[run_file.parent],
    )


def open_stores(prepared: Prepared) -> dict[str, PromptStore]:
    """The frozen prompts: ``train`` under the empty name, evaluation sets under their own."""
    stores = {"": open_frozen(Path(prepared.data))}
    for name, found in prepared.sets.items():
        stores[name] = open_frozen(Path(found.data))
    return stores


def sampling_settings(spec: RunSpec) -> SamplingSettings:
    """How training responses are sampled."""
    rollout = spec.rollout
    return SamplingSettings(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        seed=rollout.seed,
    )


def _overlong(spec: RunSpec) -> Callable[[Sample], float] | None:
    reward = spec.reward
    if not reward.overlong_buffer_tokens:
        return None

    def shape(sample: Sample) -> float:
        return overlong_penalty(
            len(sample.token_ids),
            max_tokens=spec.rollout.max_response_tokens,
            buffer_tokens=reward.overlong_buffer_tokens,
            penalty=reward.overlong_penalty,
        )

    return shape


def _concurrency(context: Context, pool: EnginePool) -> int:
    """Samples in flight: as planned, or by the slots that the engines came up with, if fewer."""
    rollout = context.spec.rollout
    slots = sum(
        min(
            engine.info.max_running_requests or rollout.max_running_requests,
            rollout.max_running_requests,
        )
        for engine in pool.live()
    )
    asked = rollout.engines * rollout.max_running_requests
    if not 0 < slots < asked:
        return context.plan.concurrency
    settled = settle_concurrency(context.spec, slots=slots)
    get_logger().warning(
        Event.ENGINE_SLOTS_FEWER, slots=slots, asked=asked, concurrency=settled.samples
    )
    return settled.samples


def _router(spec: RunSpec) -> RouterShape | None:
    """Of the model, where the choices of experts are to be replayed."""
    shape = read_shape(spec.model) if spec.core.routing_replay else None
    if shape is None or not shape.is_moe:
        return None
    return RouterShape(layers=shape.layers, top_k=shape.experts_per_token, experts=shape.experts)


def make_producer(
    context: Context,
    engines: Engines,
    ledger: Ledger,
    stores: Mapping[str, PromptStore],
    verifiers: VerifierPool,
    recorder: Recorder,
    *,
    vocab_size: int,
    next_collection: int,
    decode_folder: str,
    teacher: Teacher | None = None,
) -> Producer:
    """The producer of this epoch; admission starts with the first publication."""
    spec, clock = context.spec, context.clock
    rollout = spec.rollout
    counts = ledger.counts()
    settings = ProducerSettings(
        epoch=context.epoch,
        vocab_size=vocab_size,
        groups_per_collection=rollout.groups_per_collection,
        samples_per_prompt=rollout.samples_per_prompt,
        router=_router(spec),
        sampling=sampling_settings(spec),
        max_concurrent_samples=_concurrency(context, engines.pool),
        updates_per_collection=spec.core.updates_per_collection,
        max_staleness=spec.async_.max_staleness,
        buffer_collections=spec.async_.buffer_collections,
        waiting_deadline_s=rollout.waiting_deadline,
        running_deadline_s=rollout.running_deadline,
        drain_deadline_s=drain_deadline_s(spec),
        filter_max_rounds=rollout.filter_max_rounds,
    )
    rule = StopRule(clock)
    rows = recorder.open_rows(context.root.rollout_errors)
    errors = ErrorsLog(
        rule=rule,
        requeued=lambda: ledger.counts().requeued,
        clock=clock,
        series=lambda values: recorder.metrics.log(
            Axis.ERRORS, values["errors/elapsed_seconds"], values
        ),
        row=rows.append,
    )
    parts = ProducerParts(
        ledger=ledger,
        prompt=stores[""].prompt,
        pool=engines.pool,
        gate=engines.gate,
        function=SingleTurn(decode=load_decoder(Path(decode_folder))),
        # Without a verifier there is nobody to ask: only a teacher tells (OPD).
        judge=verifiers if _has_rewards(spec) else None,
        budget=SkipBudget(
            spec.reward.skip_budget,
            len(stores[""]) * spec.data.epochs,
            num_skipped=counts.skipped,
        ),
        shape=_overlong(spec),
        accept=equal_rewards if rollout.filter == "equal_rewards" else None,
        teacher=teacher,
    )
    return Producer(
        settings, parts, next_collection=next_collection, rule=rule, errors=errors, clock=clock
    )


def _has_rewards(spec: RunSpec) -> bool:
    return spec.reward.verifier is not None or spec.data.verifier_field is not None


def make_evaluator(
    context: Context,
    engines: Engines,
    prepared: Prepared,
    stores: Mapping[str, PromptStore],
    verifiers: VerifierPool,
    recorder: Recorder,
) -> Evaluator:
    """Evaluation on the shared engines."""
    spec = context.spec
    runner = SharedRunner(
        pool=engines.pool,
        gate=engines.gate,
        judge=verifiers,
        decode=load_decoder(Path(prepared.tokenizer)),
        limits=evaluation_limits(spec),
        clock=context.clock,
        attempt=context.attempt.number,
        epoch=context.epoch,
    )
    return Evaluator(
        root=context.root,
        sets=_frozen_sets(spec, prepared, stores),
        asker=_asker(context),
        runner=runner,
        metrics=recorder.metrics,
        lifecycle=recorder.lifecycle,
        clock=context.clock,
    )


def make_background_evaluator(
    context: Context,
    prepared: Prepared,
    stores: Mapping[str, PromptStore],
    recorder: Recorder,
    *,
    source: WeightSource,
    tasks: TaskGroup,
) -> BackgroundEvaluator:
    """Evaluation by others, from snapshots of the trainer's weights."""
    spec = context.spec
    return BackgroundEvaluator(
        root=context.root,
        sets=_frozen_sets(spec, prepared, stores),
        asker=_asker(context),
        source=source,
        model=Path(prepared.model),
        overflow=spec.evaluation.overflow,
        tasks=tasks,
        metrics=recorder.metrics,
        lifecycle=recorder.lifecycle,
        clock=context.clock,
    )


def _asker(context: Context) -> Asker:
    return Asker(
        run=context.spec.name,
        attempt=context.attempt.number,
        epoch=context.epoch,
        clock=context.clock,
    )


def _frozen_sets(
    spec: RunSpec, prepared: Prepared, stores: Mapping[str, PromptStore]
) -> dict[str, FrozenSet]:
    return {
        name: frozen_set(
            spec, name, store=stores[name], fingerprint=prepared.sets[name].fingerprint
        )
        for name in spec.evaluation.sets
    }
