"""Evaluations of a session: request, tries, result, and what stays outstanding."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio

from runtime.clock import Clock
from runtime.errors import EvaluationFailed, RunError
from runtime.evaluation.asking import ask_for_final, failed_result
from runtime.evaluation.files import claim_try, finish_try, start_try, write_request
from runtime.evaluation.items import ItemLog
from runtime.evaluation.opening import Asker
from runtime.evaluation.reading import standing_result
from runtime.evaluation.receipts import derive
from runtime.evaluation.records import Result, Started
from runtime.evaluation.sets import Kind
from runtime.evaluation.shared import FrozenSet, SharedRunner
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.telemetry.events import Event
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.telemetry.protocol import Axis, TrackingSink


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates named sets at the published policy; a result at that update is never made twice."""

    root: RunRoot
    sets: Mapping[str, FrozenSet]
    asker: Asker
    runner: SharedRunner
    metrics: TrackingSink
    lifecycle: LifecycleLog
    clock: Clock
    outstanding: list[str] = field(default_factory=list[str], init=False)
    """Required sets without a result, as ``evaluation/<update>/<set>``."""

    async def evaluate(self, name: str, policy: PolicyId, *, kind: Kind) -> dict[str, float]:
        """Evaluate one set; a result that stands, of any epoch, is returned as it is.

        Raises:
            EvaluationFailed: with counts; the try is recorded as failed and may be repeated.
        """
        found = standing_result(
            self.root, Chain(self.root).read(), update=policy.update, set_name=name
        )
        if found is not None and found[1].result is not None:
            # Its row may have been lost with the session that made it; the newest epoch's counts.
            self._log(name, policy.update, found[1].result.metrics)
            return found[1].result.metrics
        folder = self.root.evaluation(str(policy), name)
        if derive(folder, stands=True) is None:
            asked = self.asker.request(self.sets[name], policy, kind, mode="shared")
            write_request(folder, asked)
        claim = claim_try(folder, by="session", time=self.clock.time())
        if claim is None:
            raise EvaluationFailed(f"another process evaluates {name} at {policy}")
        number = claim[0]
        start_try(
            folder,
            number,
            Started(time=self.clock.time(), host=socket.gethostname(), pid=os.getpid()),
        )
        self.lifecycle.record(Event.EVALUATION_STARTED, update=policy.update, set=name)
        frozen = self.sets[name]
        log = ItemLog(folder / "items.jsonl", set_digest=frozen.digest, policy=str(policy))
        try:
            metrics = await self.runner.run(frozen, policy, log)
        except RunError as error:
            finish_try(folder, number, self._failure(name, policy, error))
            self.lifecycle.record(
                Event.EVALUATION_FAILED, update=policy.update, set=name, error=error.message
            )
            raise
        finish_try(
            folder,
            number,
            Result(
                time=self.clock.time(),
                state="succeeded",
                metrics=metrics,
                items=str(log.path.relative_to(self.root.path)),
                trainer_update=policy.update,
            ),
        )
        self._log(name, policy.update, metrics)
        self.lifecycle.record(Event.EVALUATION_FINISHED, update=policy.update, set=name, **metrics)
        return metrics

    def _log(self, name: str, update: int, metrics: Mapping[str, float]) -> None:
        self.metrics.log(
            Axis.EVALUATION,
            update,
            {f"evaluation/{name}/{key}": value for key, value in metrics.items()},
        )

    async def final(self, policy: PolicyId, *, retries: int, backoff_s: float) -> None:
        """Evaluate every set at the end of a run; what fails stays outstanding."""
        for name, frozen in self.sets.items():
            if not await self._finally(name, policy, retries=retries, backoff_s=backoff_s) and (
                frozen.asked.is_required("final")
            ):
                self.outstanding.append(f"evaluation/{policy.update}/{name}")

    async def _finally(
        self, name: str, policy: PolicyId, *, retries: int, backoff_s: float
    ) -> bool:
        for number in range(retries + 1):
            try:
                await self.evaluate(name, policy, kind="final")
            except RunError:
                if number < retries:
                    await anyio.sleep(backoff_s * 2**number)
            else:
                return True
        return False

    async def settle(self) -> None:
        """Nothing is made beside training here."""

    def ask_later(self, policy: PolicyId) -> None:
        """Ask for the final evaluation of a run that is being taken off its hardware.

        Whoever submits requests runs it, unless an attempt goes on before. Idempotent.
        """
        ask_for_final(self.root, self.sets, policy, self.asker)

    def _failure(self, name: str, policy: PolicyId, error: RunError) -> Result:
        return failed_result(error, set_name=name, time=self.clock.time(), trainer=policy.update)
