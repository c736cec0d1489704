import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.samples import PromptId, Span, validate_sample
from runtime.engines.protocol import Generation, SamplingSettings
from runtime.errors import (
    ContractViolation,
    OverloadError,
    SessionError,
    TransportError,
)
from runtime.policy import PolicyId
from runtime.rollout.requests import gather, join, most_telling, seeded, to_sample


def generation(lengths, first_update, finish="stop"):
    spans, at = [], 0
    for i, length in enumerate(lengths):
        spans.append(Span(at, at + length, PolicyId(1, first_update + i)))
        at += length
    return Generation(
        token_ids=tuple(range(at)),
        logprobs=(-0.5,) * at,
        spans=tuple(spans),
        prefill=PolicyId(1, first_update),
        finish=finish,
    )


parts = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(parts, parts, st.integers(0, 2))
def test_a_continued_response_is_a_valid_sample_of_all_its_tokens(head, tail, gap):
    first = generation(head, 0, "abort")
    second = generation(tail, len(head) - 1 + gap)
    whole = join(first, second)
    validate_sample(to_sample(whole, ""), epoch=1, vocab_size=1000)
    assert whole.token_ids == first.token_ids + second.token_ids
    assert whole.prefill == first.prefill
    assert whole.finish == second.finish
    policies = [span.policy for span in whole.spans]
    assert policies == sorted(set(policies)), "one span for each policy"


def test_nothing_of_an_empty_partial_remains():
    empty = Generation(token_ids=(), logprobs=(), spans=(), prefill=PolicyId(1, 0), finish="abort")
    tail = generation([3], 5)
    assert join(empty, tail) == tail


def test_an_aborted_response_is_no_sample():
    with pytest.raises(ContractViolation):
        to_sample(generation([1], 0, "abort"), "")


def test_seeds_differ_between_samples_and_not_between_attempts():
    sampling = SamplingSettings(max_new_tokens=4, seed=11)
    seeds = [
        seeded(sampling, PromptId(p, i), s).seed
        for p in range(2) for i in range(5) for s in range(5)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == seeded(sampling, PromptId(0, 0), 0).seed
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.anyio
async def test_a_failing_sibling_cancels_the_others_and_they_are_joined():
    ended = []

    async def hanging():
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.append("hanging")

    async def failing():
        await anyio.lowlevel.checkpoint()
        raise TransportError("reset")

    with pytest.raises(TransportError):
        await gather([hanging, failing, hanging])
    assert ended == ["hanging", "hanging"]


@pytest.mark.anyio
async def test_a_sibling_cancelled_by_nobody_is_an_error():
    async def leaking():
        raise anyio.get_cancelled_exc_class()

    async def fine():
        return 1

    with pytest.raises(SessionError):
        await gather([fine, leaking])


def test_a_fatal_error_goes_before_a_recoverable_one():
    fatal = ContractViolation("tokens")
    nested = ExceptionGroup("", [OverloadError("full"), ExceptionGroup("", [fatal])])
    assert most_telling([TransportError("reset"), nested]) is fatal
