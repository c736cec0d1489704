"""Evidence of policy agreement where training itself gives none.

With responses always older than the trainer, no collection holds one that is wholly of the policy
being
scored. So right after the first publication, and after every 50th, a few responses are generated
and scored at equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.data.samples import Prompt, PromptId
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.errors import ContractViolation, EngineRefused
from runtime.policy import PolicyId
from runtime.trainer.handle import TrainerHandle
from runtime.trainer.protocol import Sequence

NUM_RESPONSES = 8
EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementProbe:
    """Generates and scores ``NUM_RESPONSES`` responses at one policy."""

    pool: EnginePool
    trainer: TrainerHandle
    prompt: Callable[[PromptId], Prompt]
    num_prompts: int
    sampling: SamplingSettings
    limit: float
    """``core.max_mean_logprob_gap``: a mean."""
    deadline_s: float

    async def measure(self, policy: PolicyId) -> dict[str, float]:
        """Mean, p99 and maximum of the gap, and over how many tokens.

        Args:
            policy: published, and what the trainer holds.

        Raises:
            ContractViolation: if the mean gap is above the limit.
            EngineRefused: if an answer is not of that policy.
            ServingError: if a request failed; may be repeated.
        """
        sequences: list[Sequence] = []
        for index in range(min(NUM_RESPONSES, self.num_prompts)):
            prompt = self.prompt(PromptId(0, index))
            sequences.append(_sequence(prompt, await self._answer(prompt, policy), policy, index))
        scores = await self.trainer.score(tuple(sequences), temperature=self.sampling.temperature)
        gap = np.abs(
            np.concatenate(scores).astype(np.float64)
            - np.concatenate([sequence.logprobs for sequence in sequences])
        )
        figures = {
            "gap_mean": float(gap.mean()),
            "gap_p99": float(np.quantile(gap, 0.99)),
            "gap_max": float(gap.max()),
            "tokens": float(gap.size),
            "responses": float(len(sequences)),
        }
        if not figures["gap_mean"] <= self.limit:
            raise ContractViolation(
                f"policy_agreement: mean log-prob gap {figures['gap_mean']:.3e} between trainer "
                f"and engine at {policy} is above {self.limit:.1e}",
                policy=str(policy),
                **figures,
            )
        return figures

    async def _answer(self, prompt: Prompt, policy: PolicyId) -> Generation:
        route = self.pool.choose()
        request = GenerateRequest(
            rid=f"probe-{policy}-{prompt.id}",
            input_ids=prompt.token_ids,
            sampling=self.sampling,
            salt=str(policy) if route.takes_salt else None,
        )
        self.pool.enter(route, 1)
        try:
            (answer,) = await route.client.generate(request, deadline_s=self.deadline_s)
        finally:
            self.pool.leave(route, 1)
        if not answer.token_ids or {s.policy for s in answer.spans} != {policy}:
            raise EngineRefused(f"engine {route.slot} answered a probe of {policy} otherwise")
        return answer


def _sequence(prompt: Prompt, answer: Generation, policy: PolicyId, group: int) -> Sequence:
    count = len(answer.token_ids)
    return Sequence(
        tokens=np.array([*prompt.token_ids, *answer.token_ids], np.int32),
        prompt_len=len(prompt.token_ids),
        logprobs=np.array(answer.logprobs, np.float32),
        mask=np.ones(count, np.float32),
        advantage=0.0,
        span_ends=np.array([count], np.int32),
        span_updates=np.array([policy.update], np.int32),
        prefill_update=answer.prefill.update,
        group=group,
        is_equal=True,
    )
