"""Evaluation sets of a run, ready to be asked: what the run file says, and the frozen prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import JsonValue

from configs.run import RunSpec
from runtime.clock import Clock
from runtime.data.frozen import PromptStore
from runtime.evaluation.records import Mode, Request, Snapshot
from runtime.evaluation.sets import EvaluationSet, Kind
from runtime.evaluation.shared import EvaluationLimits, FrozenSet
from runtime.policy import PolicyId
from runtime.rollout.settings import drain_deadline_s


def frozen_set(spec: RunSpec, name: str, *, store: PromptStore, fingerprint: str) -> FrozenSet:
    """One set of a run.

    Args:
        spec: the run file.
        name: of the set, which the run file has.
        store: its frozen prompts.
        fingerprint: of them, as ``prepared/`` records it.
    """
    asked = EvaluationSet.from_config(
        name,
        spec.evaluation.sets[name],
        verifier=spec.reward.verifier or "",
        max_response_tokens=spec.rollout.max_response_tokens,
        stop=tuple(spec.rollout.stop),
    )
    digest = asked.digest(prompts_fingerprint=fingerprint)
    return FrozenSet(asked=asked, store=store, digest=digest)


def evaluation_limits(spec: RunSpec) -> EvaluationLimits:
    """Deadlines and budgets of one evaluation of a run."""
    return EvaluationLimits(
        deadline_s=spec.evaluation.deadline,
        drain_deadline_s=drain_deadline_s(spec),
        call_deadline_s=spec.rollout.waiting_deadline + spec.rollout.running_deadline,
        skip_share=spec.reward.skip_budget,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks for evaluations: one session of a run."""

    run: str
    attempt: int
    epoch: int
    clock: Clock

    def request(
        self,
        frozen: FrozenSet,
        policy: PolicyId,
        kind: Kind,
        *,
        mode: Mode,
        snapshot: Snapshot | None = None,
    ) -> Request:
        """What is asked of one set at one policy; nothing is written."""
        sampling: dict[str, JsonValue] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(frozen.asked.sampling).items()
        }
        return Request(
            time=self.clock.time(),
            run=self.run,
            policy=str(policy),
            set=frozen.asked.name,
            kind=kind,
            required=frozen.asked.is_required(kind),
            mode=mode,
            attempt=self.attempt,
            epoch=self.epoch,
            snapshot=snapshot,
            set_digest=frozen.digest,
            sampling=sampling,
            seed=frozen.asked.seed,
        )
