"""From a group to requests and back: seeds, siblings that fail together, joined partials."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import anyio

from runtime import faults
from runtime.data.routed import RoutedExperts
from runtime.data.samples import PromptId, Sample, Span
from runtime.engines.protocol import Generation, SamplingSettings
from runtime.errors import ContractViolation, ServingError, SessionError

T = TypeVar("T")


def is_uniform(sampling: SamplingSettings) -> bool:
    """All samples of a group may go out as one request (``n``): nothing differs between them."""
    return sampling.seed is None


def seeded(sampling: SamplingSettings, prompt: PromptId, sample: int) -> SamplingSettings:
    """Sampling of one sample where a seed is set: equal in every attempt, all different."""
    text = f"{sampling.seed}/{prompt}/{sample}".encode()
    digest = hashlib.blake2b(text, digest_size=4).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run siblings together; a failure cancels the others, and all are joined before it is raised.

    Raises:
        Exception: the failure; of several, one that nobody may retry goes before a serving error.
        SessionError: if a sibling ended as cancelled although nobody had cancelled it.
    """
    missing = object()
    results: list[object] = [missing] * len(calls)
    failures: list[Exception] = []

    async def run(index: int, call: Callable[[], Awaitable[T]], scope: anyio.CancelScope) -> None:
        try:
            results[index] = await call()
        except Exception as error:
            failures.append(error)
            scope.cancel()

    if faults.plan is not None:
        await faults.plan.pause("group.gather")
    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(run, index, call, tasks.cancel_scope)
    if failures:
        raise most_telling(failures)
    if missing in results:
        raise SessionError("a generation call was cancelled by nobody (a leaked CancelledError)")
    return cast(list[T], results)


def most_telling(errors: Iterable[Exception]) -> Exception:
    """Unfold exception groups and choose: a fatal error goes before one the group may retry."""
    flat: list[Exception] = []
    for error in errors:
        if isinstance(error, ExceptionGroup):
            inner = cast(ExceptionGroup[Exception], error)
            flat.append(most_telling(inner.exceptions))
        else:
            flat.append(error)
    return next((e for e in flat if not isinstance(e, ServingError)), flat[0])


def join(head: Generation, tail: Generation) -> Generation:
    """A partial response and what a later request went on with, as one response.

    Args:
        head: aborted; may be empty (aborted while waiting), then nothing of it remains.
        tail: generated from prompt + head.
    """
    if not head.token_ids:
        return tail
    shift = len(head.token_ids)
    spans = list(head.spans)
    for span in tail.spans:
        moved = Span(span.start + shift, span.end + shift, span.policy)
        if spans and spans[-1].policy == moved.policy:
            moved = Span(spans.pop().start, moved.end, moved.policy)
        spans.append(moved)
    return replace(
        tail,
        token_ids=head.token_ids + tail.token_ids,
        logprobs=head.logprobs + tail.logprobs,
        spans=tuple(spans),
        prefill=head.prefill,
        routed=_joined(head, tail),
        prompt_tokens=head.prompt_tokens,
        cached_tokens=head.cached_tokens,
    )


def _joined(head: Generation, tail: Generation) -> RoutedExperts | None:
    if head.routed is None or tail.routed is None:
        return tail.routed
    return head.routed.followed_by(tail.routed)


def to_sample(generation: Generation, text: str) -> Sample:
    """A finished response as a sample without a reward.

    Raises:
        ContractViolation: if the response was aborted.
    """
    if generation.finish == "abort":
        raise ContractViolation("an aborted response reached the samples of a group")
    return Sample(
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        spans=generation.spans,
        prefill=generation.prefill,
        finish=generation.finish,
        text=text,
        routed=generation.routed,
    )
