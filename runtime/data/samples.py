"""Prompts, samples, groups and collections: what moves between engine, ledger and trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from runtime.data.routed import RoutedExperts
from runtime.errors import ContractViolation
from runtime.policy import PolicyId

if TYPE_CHECKING:
    # With numpy; whoever asks how a run stands loads this file, and no arrays.
    from runtime.data.teacher import TeacherScores

Finish = Literal["stop", "length"]
_PROMPT_ID = re.compile(r"([0-9]+):([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class PromptId:
    """Identity of a prompt: pass over the data and row of the frozen data file, both from 0."""

    pass_: int
    index: int

    def __str__(self) -> str:
        return f"{self.pass_}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``0:17``.

        Raises:
            ValueError: if the text is anything else.
        """
        match = _PROMPT_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"not a prompt id: {text!r} (expected <pass>:<row>)")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked."""

    id: PromptId
    token_ids: tuple[int, ...]
    """The templated prompt, as the engine gets it; never empty."""
    text: str
    """The prompt as a person reads it."""
    answer: str | None
    """Reference for the verifier; None where the verifier needs none."""
    verifier: str
    """Name of the verifier that judges this prompt."""
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a response that one policy generated."""

    start: int
    end: int
    policy: PolicyId


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt."""

    token_ids: tuple[int, ...]
    """What the engine generated, never re-tokenised; a stop token is included."""
    logprobs: tuple[float, ...]
    """Behaviour log-prob of each token, natural log, at the sampling temperature."""
    spans: tuple[Span, ...]
    """Tile [0, len(token_ids)) in order."""
    prefill: PolicyId
    """The policy that read the prompt."""
    finish: Finish
    text: str = ""
    reward: float | None = None
    """None until the verifier has spoken."""
    loss_mask: tuple[int, ...] | None = None
    """1 where the token was sampled by the policy and trains; None means all ones."""
    routed: RoutedExperts | None = None
    """Experts that read each token of prompt and response but the last; None unless recorded."""
    teacher: TeacherScores | None = None
    """What a served teacher says about its tokens; None without one."""

    @property
    def oldest(self) -> PolicyId:
        """The oldest policy with a token in the response."""
        return min(span.policy for span in self.spans)

    @property
    def is_mixed(self) -> bool:
        """More than one policy generated tokens."""
        return len({span.policy for span in self.spans}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt that share a baseline: the unit of admission, retry, accounting."""

    prompt: Prompt
    attempt: int
    """Attempt id of this group in the ledger; late events of an older one are ignored."""
    samples: tuple[Sample, ...]

    @property
    def oldest(self) -> PolicyId:
        """The oldest behaviour policy in the group; staleness counts from its update."""
        return min(sample.oldest for sample in self.samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Reward of each sample.

        Raises:
            ContractViolation: if a sample has none.
        """
        values = tuple(s.reward for s in self.samples if s.reward is not None)
        if len(values) != len(self.samples):
            raise ContractViolation(
                f"group {self.prompt.id} reached the trainer with an unrewarded sample",
                prompt=str(self.prompt.id),
            )
        return values

    @property
    def is_equal(self) -> bool:
        """Largest reward equals smallest: the group carries no policy gradient."""
        rewards = self.rewards
        return max(rewards) == min(rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The groups the trainer consumes at once."""

    id: int
    """Counts from 1 within a run's committed history."""
    groups: tuple[Group, ...]
    taken_at: PolicyId
    """The trainer's policy when the collection was taken."""


def validate_sample(sample: Sample, *, epoch: int, vocab_size: int) -> None:
    """Refuse a sample whose provenance or shape cannot be trusted.

    Args:
        sample: the response with its spans.
        epoch: the ownership epoch of this session; older epochs' policies may not appear.
        vocab_size: token ids lie in [0, vocab_size).

    Raises:
        ContractViolation: on an empty response, lengths that disagree, spans with gaps, overlaps or
            decreasing policies, a foreign epoch, a token outside the vocabulary, a log-prob that is
            not finite or above zero, a mask of anything but 0 and 1, a response that is not whole.
    """
    n = len(sample.token_ids)
    problems: list[str] = []
    if n == 0:
        problems.append("the response is empty")
    if len(sample.logprobs) != n:
        problems.append(f"{len(sample.logprobs)} log-probs for {n} tokens")
    if sample.loss_mask is not None and len(sample.loss_mask) != n:
        problems.append(f"loss mask of {len(sample.loss_mask)} for {n} tokens")
    # Whole-tuple operations: this runs over every token that was ever generated.
    if not {int}.issuperset(map(type, sample.token_ids)) or (
        n and not 0 <= min(sample.token_ids) <= max(sample.token_ids) < vocab_size
    ):
        problems.append(f"a token id that is no integer in [0, {vocab_size})")
    if not math.isfinite(sum(sample.logprobs)) or max(sample.logprobs, default=0.0) > 1e-6:
        problems.append("a log-prob that is not finite or above 0")
    if sample.loss_mask is not None and not {0, 1}.issuperset(sample.loss_mask):
        problems.append("a loss mask with other values than 0 and 1")
    if sample.finish not in ("stop", "length"):
        problems.append(f"finish {sample.finish!r}: only stop and length are whole responses")
    problems += _span_problems(sample, n, epoch)
    if problems:
        raise ContractViolation(
            "sample refused: " + "; ".join(problems),
            spans=[(s.start, s.end, str(s.policy)) for s in sample.spans],
            num_tokens=n,
        )


def _span_problems(sample: Sample, n: int, epoch: int) -> list[str]:
    problems: list[str] = []
    at = 0
    last = sample.prefill
    for span in sample.spans:
        if span.start != at or span.end <= span.start:
            problems.append(f"span [{span.start}, {span.end}) does not continue at {at}")
        if span.policy < last:
            problems.append(f"policy {span.policy} after {last}")
        at, last = span.end, span.policy
    if at != n:
        problems.append(f"spans end at {at}, the response at {n}")
    foreign = {str(s.policy) for s in sample.spans if s.policy.epoch != epoch}
    if sample.prefill.epoch != epoch:
        foreign.add(str(sample.prefill))
    if foreign:
        problems.append(f"policies {sorted(foreign)}: this session owns only epoch {epoch}")
    return problems
