"""Rollout functions: a prompt goes in, samples come out.

A function decides what is asked of the engine and in how many turns. It keeps the token ids that
were generated (nothing is tokenised again) and, where other tokens stand between its turns, marks
in ``loss_mask`` which ones the policy sampled. Slots, gate, routing, deadlines, retries, rewards
and accounting are the producer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runtime.data.samples import Prompt, Sample
from runtime.engines.protocol import Generation, SamplingSettings
from runtime.rollout.requests import gather, is_uniform, seeded, to_sample


class Generate(Protocol):
    """The group's way to an engine."""

    async def __call__(
        self, input_ids: Sequence[int], sampling: SamplingSettings, *, n: int = 1
    ) -> list[Generation]:
        """Sample ``n`` finished responses to ``input_ids``, in order.

        May wait for a slot and for admission; a response that a publication aborted is gone on with
        under the new policy before this returns.

        Raises:
            ServingError: the attempt failed; let it through, the producer retries the whole group.
            ContractViolation: the answer cannot be trusted.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """What a rollout function is asked for."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingSettings
    """``max_new_tokens`` bounds the tokens the policy samples in one sample, all turns together."""


class RolloutFunction(Protocol):
    """Makes the samples of one group."""

    async def __call__(self, task: RolloutTask, generate: Generate) -> list[Sample]:
        """Return ``task.num_samples`` samples with text and without rewards.

        May be cancelled at any await and run again from the start. Must not leave tasks behind.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurn:
    """One prompt, one response: the default."""

    decode: Callable[[Sequence[int]], str]
    """Token ids to the text the verifier reads, special tokens left out."""

    async def __call__(self, task: RolloutTask, generate: Generate) -> list[Sample]:
        """One request for the group where sampling is uniform, otherwise one per sample."""
        ids, sampling = task.prompt.token_ids, task.sampling
        if is_uniform(sampling):
            generations = await generate(ids, sampling, n=task.num_samples)
        else:
            own = [seeded(sampling, task.prompt.id, i) for i in range(task.num_samples)]
            parts = await gather([partial(generate, ids, each) for each in own])
            generations = [generation for part in parts for generation in part]
        return [to_sample(g, self.decode(g.token_ids)) for g in generations]
