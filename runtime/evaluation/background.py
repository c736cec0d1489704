"""The session's side of background evaluation: snapshots beside training, requests, results.

The session submits nothing: the attached flow does, and where none is attached the resubmission
flow. Training waits for the weights to leave the trainer, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from runtime.checkpoints.export import ExportReceipt, export_snapshot, read_receipt
from runtime.clock import Clock
from runtime.errors import StoreError
from runtime.evaluation.asking import ask_for_final
from runtime.evaluation.files import ask_once, skip
from runtime.evaluation.found import at_update
from runtime.evaluation.opening import Asker
from runtime.evaluation.reading import receipts_of, standing_result
from runtime.evaluation.receipts import EvaluationReceipt
from runtime.evaluation.records import Request, Snapshot
from runtime.evaluation.sets import Kind
from runtime.evaluation.shared import FrozenSet
from runtime.evaluation.snapshots import release_snapshots, snapshot_of
from runtime.policy import PolicyId
from runtime.publication.disk import WeightSource
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.telemetry.events import Event
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.telemetry.protocol import Axis, TrackingSink

IN_FLIGHT = 2
"""Background evaluations of one run at the same time."""
_LOOK_S = 2.0


@dataclass(slots=True)
class _Taking:
    """A snapshot under way, and the sets that wait for it."""

    waiting: list[tuple[str, Kind]] = field(default_factory=list[tuple[str, Kind]])
    made: ExportReceipt | None = None
    problem: StoreError | None = None
    written: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True, kw_only=True)
class BackgroundEvaluator:
    """Asks for evaluations in place of making them; the same face as ``Evaluator``."""

    root: RunRoot
    sets: Mapping[str, FrozenSet]
    asker: Asker
    source: WeightSource
    model: Path
    overflow: Literal["wait", "skip"]
    tasks: TaskGroup
    """Of the session: snapshots are finished there, beside training."""
    metrics: TrackingSink
    lifecycle: LifecycleLog
    clock: Clock
    outstanding: list[str] = field(default_factory=list[str], init=False)
    """Required sets without a result, as ``evaluation/<update>/<set>``."""
    _takings: dict[PolicyId, _Taking] = field(default_factory=dict[PolicyId, _Taking], init=False)
    _landed: set[Path] = field(default_factory=set[Path], init=False)

    async def evaluate(self, name: str, policy: PolicyId, *, kind: Kind) -> None:
        """Ask for one set at ``policy``; returns once training may go on. Idempotent.

        A snapshot that cannot be written becomes the receipt's reason; training notices nothing.

        Raises:
            FencedError: if a newer owner exists.
        """
        if self._is_asked(name, policy):
            return
        if self._may_skip(name, kind) and self._num_unsettled() >= IN_FLIGHT:
            folder = self.root.evaluation(str(policy), name)
            if ask_once(folder, self._request(name, policy, kind, None)):
                skip(folder, "busy", time=self.clock.time())
            return
        taking = self._takings.get(policy)
        if taking is None:
            await self.settle()  # one at a time: a snapshot costs disk and a thread's digests
            release_snapshots(self.root, self.asker.epoch)
            taking = self._takings[policy] = _Taking()
            self.tasks.start_soon(self._take, policy, taking)
        taking.waiting.append((name, kind))
        await taking.written.wait()
        if taking.done.is_set():
            self._ask(taking, policy)

    async def final(self, policy: PolicyId, *, retries: int, backoff_s: float) -> None:
        """Ask for every set at the end of a run; all that is required is outstanding then."""
        del retries, backoff_s  # who submits retries
        await self.settle()
        final_export = self._export_of(policy)
        for name, frozen in self.sets.items():
            if not self._is_asked(name, policy):
                if final_export is None:
                    await self.evaluate(name, policy, kind="final")
                else:
                    folder = self.root.evaluation(str(policy), name)
                    ask_once(folder, self._request(name, policy, "final", final_export))
            records = Chain(self.root).read()
            found = standing_result(self.root, records, update=policy.update, set_name=name)
            if found is None and frozen.asked.is_required("final"):
                self.outstanding.append(f"evaluation/{policy.update}/{name}")
        await self.settle()
        await self.land()

    def ask_later(self, policy: PolicyId) -> None:
        """See ``Evaluator.ask_later``."""
        ask_for_final(self.root, self.sets, policy, self.asker)

    async def settle(self) -> None:
        """Wait until every snapshot under way stands, and its requests are written."""
        for taking in list(self._takings.values()):
            await taking.done.wait()

    async def land_for_ever(self) -> None:
        """Put results on their axis as they come; until cancelled."""
        while True:
            await self.land()
            await anyio.sleep(_LOOK_S)

    async def land(self) -> None:
        """Log what has come since: at its own update, with its lag. Each once a session."""
        for receipt in await anyio.to_thread.run_sync(self._new_results):
            assert receipt.result is not None
            name = receipt.request.set
            figures = dict(receipt.result.metrics)
            figures |= {"lag_s": receipt.lag_s or 0.0, "lag_updates": receipt.lag_updates or 0}
            self.metrics.log(
                Axis.EVALUATION,
                receipt.update,
                {f"evaluation/{name}/{key}": value for key, value in figures.items()},
            )
            self.lifecycle.record(
                Event.EVALUATION_FINISHED, update=receipt.update, set=name, **figures
            )

    def _new_results(self) -> list[EvaluationReceipt]:
        records = Chain(self.root).read()
        found = [
            (folder, receipt)
            for folder, receipt in receipts_of(self.root, records, known=self._landed)
            if receipt.result is not None
            and receipt.stands
            and receipt.request.mode == "background"
        ]
        self._landed.update(folder for folder, _ in found)
        return [receipt for _, receipt in found]

    async def _take(self, policy: PolicyId, taking: _Taking) -> None:
        try:
            taking.made = await export_snapshot(
                self.root,
                self.source,
                policy,
                model=self.model,
                epoch=self.asker.epoch,
                on_written=taking.written.set,
            )
        except StoreError as error:
            taking.problem = error
        finally:
            taking.written.set()
        self._ask(taking, policy)
        taking.done.set()

    def _ask(self, taking: _Taking, policy: PolicyId) -> None:
        snapshot: Snapshot | None = None
        if taking.made is not None:
            folder = self.root.snapshots / str(policy)
            snapshot = snapshot_of(folder, taking.made, is_leased=True)
        waiting, taking.waiting = taking.waiting, []
        for name, kind in waiting:
            folder = self.root.evaluation(str(policy), name)
            # A person may have asked meanwhile, without a snapshot: theirs goes on without ours.
            is_ours = ask_once(folder, self._request(name, policy, kind, snapshot))
            if is_ours and taking.problem is not None:
                skip(folder, "export_failed", time=self.clock.time())
                self.lifecycle.record(
                    Event.EVALUATION_FAILED,
                    update=policy.update,
                    set=name,
                    error=taking.problem.message,
                )

    def _request(
        self, name: str, policy: PolicyId, kind: Kind, snapshot: Snapshot | None
    ) -> Request:
        return self.asker.request(
            self.sets[name], policy, kind, mode="background", snapshot=snapshot
        )

    def _is_asked(self, name: str, policy: PolicyId) -> bool:
        """Asked or answered at this update, under a policy that stands; of any epoch."""
        records = Chain(self.root).read()
        return any(
            receipt.request.set == name
            and receipt.stands
            and receipt.reason not in ("superseded", "busy")
            for _, receipt in receipts_of(self.root, records, at_update(policy.update))
        )

    def _may_skip(self, name: str, kind: Kind) -> bool:
        """The run's last update, and what it owes otherwise, wait for their place."""
        is_owed = kind == "final" or self.sets[name].asked.is_required(kind)
        return self.overflow == "skip" and not is_owed

    def _num_unsettled(self) -> int:
        records = Chain(self.root).read()
        return sum(
            receipt.request.mode == "background"
            and receipt.state in ("requested", "submitted", "running")
            for _, receipt in receipts_of(self.root, records)
        )

    def _export_of(self, policy: PolicyId) -> Snapshot | None:
        """The final export as a snapshot, where it stands at this policy."""
        receipt = read_receipt(self.root.export)
        if receipt is None or not receipt.is_model:
            return None
        if PolicyId.parse(receipt.policy).update != policy.update:
            return None
        records = Chain(self.root).read()
        if not history.is_standing(records, PolicyId.parse(receipt.policy)):
            return None
        return snapshot_of(self.root.export, receipt, is_leased=False)
