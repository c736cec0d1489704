"""One try of a background evaluation, from claim to result, on engines of its own.

Needs the output root and nothing else of the run: no session, no Ray, no Prefect. What it does in
turn: prove the snapshot (or export the commit), start engines and verify them, ask what has no item
yet, write the result. Killed at any of these, another try goes on from the items.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from configs.plan import Plan
from configs.run import RunSpec
from runtime.clock import Clock, SystemClock
from runtime.data.decoder import load_decoder
from runtime.data.frozen import open_frozen
from runtime.errors import EvaluationFailed, ManifestConflict, OwnedError, RunError, StoreError
from runtime.evaluation.asking import failed_result
from runtime.evaluation.engines import EngineUnhealthy, OwnEngines, own_engines
from runtime.evaluation.files import finish_try, start_try
from runtime.evaluation.items import ItemLog
from runtime.evaluation.opening import evaluation_limits, frozen_set
from runtime.evaluation.receipts import EvaluationReceipt, derive
from runtime.evaluation.records import Request, Result, SkipReason, Started
from runtime.evaluation.shared import FrozenSet, SharedRunner
from runtime.evaluation.snapshots import (
    SnapshotFailed,
    SnapshotMissing,
    Weights,
    find_weights,
    make_weights,
)
from runtime.policy import PolicyId
from runtime.rollout.gate import AdmissionGate
from runtime.rundir import atomic, history, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record
from runtime.waits import stretched

_START_DEADLINE_S = 600.0
_AGAIN_DEADLINE_S = 300.0
"""For an engine to come back after the last one died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """Which try of which evaluation."""

    root: RunRoot
    policy: str
    set_name: str
    number: int
    flow_run: str | None = None
    """The deployment run that executes it."""

    @property
    def folder(self) -> Path:
        """Of the evaluation."""
        return self.root.evaluation(self.policy, self.set_name)


async def run_job(order: JobOrder, *, clock: Clock | None = None) -> Result:
    """Make one try's result stand. Idempotent: a result that exists is never computed again.

    Returns:
        The standing result: succeeded, or skipped because an attempt went on past it.

    Raises:
        SnapshotMissing, SnapshotFailed, EngineUnhealthy: recorded as the reason it was skipped.
        RunError: recorded as the failure of this try.
        OwnedError: if another process runs this try; nothing was written.
        FileNotFoundError: if nothing was requested.
    """
    clock = clock or SystemClock()
    records = Chain(order.root).read()
    stands = history.is_standing(records, PolicyId.parse(order.policy))
    receipt = derive(order.folder, stands=stands)
    if receipt is None:
        raise FileNotFoundError(f"no evaluation was requested in {order.folder}")
    if receipt.result is not None:
        return receipt.result
    if standing := _standing(receipt, order.number):
        return standing
    _start(order, clock)
    if not stands:
        return _skipped(order, "superseded", clock)
    try:
        metrics = await _evaluate(order, receipt.request, records, clock)
    except (SnapshotMissing, SnapshotFailed, EngineUnhealthy) as error:
        _skipped(order, _REASONS[type(error)], clock)
        raise
    except RunError as error:
        failed = failed_result(
            error,
            set_name=order.set_name,
            time=clock.time(),
            trainer=_trainer_update(order.root),
        )
        finish_try(order.folder, order.number, failed)
        raise
    items = order.folder / "items.jsonl"
    return finish_try(
        order.folder,
        order.number,
        Result(
            time=clock.time(),
            state="succeeded",
            metrics=metrics,
            items=str(items.relative_to(order.root.path)),
            trainer_update=_trainer_update(order.root),
        ),
    )


_REASONS: dict[type[RunError], SkipReason] = {
    SnapshotMissing: "snapshot_missing",
    SnapshotFailed: "export_failed",
    EngineUnhealthy: "engine_unhealthy",
}


def _standing(receipt: EvaluationReceipt, number: int) -> Result | None:
    return receipt.tries[number].result if number < len(receipt.tries) else None


def _start(order: JobOrder, clock: Clock) -> None:
    """Say that this process runs the try; the same deployment run may say so again.

    Raises:
        OwnedError: if another one does.
    """
    ours = Started(
        time=clock.time(), host=socket.gethostname(), pid=os.getpid(), flow_run=order.flow_run
    )
    standing = start_try(order.folder, order.number, ours)
    is_ours = (
        standing.flow_run == ours.flow_run
        if ours.flow_run is not None
        else (standing.host, standing.pid) == (ours.host, ours.pid)
    )
    if not is_ours:
        raise OwnedError(
            f"try {order.number} of {order.policy}/{order.set_name} runs in pid {standing.pid} on "
            f"{standing.host}, flow run {standing.flow_run}"
        )


def _skipped(order: JobOrder, reason: SkipReason, clock: Clock) -> Result:
    result = Result(time=clock.time(), state="skipped", reason=reason)
    return finish_try(order.folder, order.number, result)


def _trainer_update(root: RunRoot) -> int | None:
    """Where training stands now, for the lag."""
    view = workflow.read(root)
    return view.update if view is not None else None


async def _evaluate(
    order: JobOrder, request: Request, records: tuple[Record, ...], clock: Clock
) -> dict[str, float]:
    # Not at the top: the session's rooms import this one.
    from runtime.session.preparing import Prepared
    from runtime.session.serving import make_verifiers

    root = order.root
    spec = RunSpec.model_validate_json(atomic.read_bytes(root.run) or b"")
    plan = Plan.model_validate_json(atomic.read_bytes(root.plan) or b"")
    prepared = Prepared.read(root)
    if prepared is None or order.set_name not in prepared.sets:
        raise StoreError(f"{root.prepared} does not hold the set {order.set_name}")
    found = prepared.sets[order.set_name]
    store = await anyio.to_thread.run_sync(open_frozen, Path(found.data))
    frozen = frozen_set(spec, order.set_name, store=store, fingerprint=found.fingerprint)
    if frozen.digest != request.set_digest:
        raise ManifestConflict(
            f"the set {order.set_name} is another one now: digest {frozen.digest[:12]}, "
            f"asked for {request.set_digest[:12]}"
        )
    weights = await anyio.to_thread.run_sync(find_weights, root, records, request)
    if weights is None:
        weights = await _from_commit(spec, root, records, request, Path(prepared.model))
    policy = PolicyId.parse(request.policy)
    log = ItemLog(
        order.folder / "items.jsonl", set_digest=request.set_digest, policy=request.policy
    )
    async with (
        make_verifiers(spec, plan.run_file, {order.set_name: store}) as judge,
        own_engines(
            spec,
            weights,
            policy,
            logs=order.folder / "tries" / str(order.number),
            threads=int(os.environ.get("MILEPOST_TORCH_THREADS", "1")),
            start_deadline_s=stretched("readiness", _START_DEADLINE_S),
            clock=clock,
        ) as engines,
    ):
        runner = SharedRunner(
            pool=engines.pool,
            gate=AdmissionGate(clock=clock),
            judge=judge,
            decode=load_decoder(Path(prepared.tokenizer)),
            limits=evaluation_limits(spec),
            clock=clock,
            attempt=request.attempt,
            epoch=request.epoch,
        )
        return await _ask(runner, engines, frozen, log, retries=spec.session.retries)


async def _ask(
    runner: SharedRunner,
    engines: OwnEngines,
    frozen: FrozenSet,
    log: ItemLog,
    *,
    retries: int,
) -> dict[str, float]:
    """Ask until every item is done; engines that died meanwhile are waited for."""
    for number in range(retries + 1):
        try:
            return await runner.run(frozen, engines.policy, log)
        except EvaluationFailed:
            if number == retries:
                raise
            await engines.until_available(deadline_s=stretched("readiness", _AGAIN_DEADLINE_S))
    raise AssertionError  # the loop returns or raises


async def _from_commit(
    spec: RunSpec,
    root: RunRoot,
    records: tuple[Record, ...],
    request: Request,
    model: Path,
) -> Weights:
    from runtime.checkpoints.from_commit import trainer_of  # loads torch

    trainer = await anyio.to_thread.run_sync(trainer_of, spec)
    try:
        return await make_weights(root, records, request, model=model, trainer=trainer)
    finally:
        with anyio.CancelScope(shield=True):
            await trainer.shutdown()
