"""A sample whose provenance or shape cannot be trusted never gets past the validator."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.samples import PromptId, Sample, validate_sample
from runtime.errors import ContractViolation
from runtime.policy import PolicyId
from tests.runtime.data.sample_strategies import EPOCH, VOCABULARY, examples, groups, samples


def check(sample: Sample) -> None:
    validate_sample(sample, epoch=EPOCH, vocab_size=VOCABULARY)


@examples(60)
@given(samples())
def test_a_sample_in_order_passes(sample):
    check(sample)


def _put(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


def _older(policy: PolicyId) -> PolicyId:
    return PolicyId(policy.epoch, policy.update - 1)


# Each takes a good sample and a place in it, and breaks one thing.
CORRUPTIONS = {
    "no response": lambda s, i, k: replace(s, token_ids=(), logprobs=(), spans=(), loss_mask=None),
    "token too many": lambda s, i, k: replace(s, token_ids=(*s.token_ids, 0)),
    "token lost": lambda s, i, k: replace(s, token_ids=s.token_ids[:i] + s.token_ids[i + 1 :]),
    "token below": lambda s, i, k: replace(s, token_ids=_put(s.token_ids, i, -1)),
    "token above": lambda s, i, k: replace(s, token_ids=_put(s.token_ids, i, VOCABULARY)),
    "token no integer": lambda s, i, k: replace(s, token_ids=_put(s.token_ids, i, 1.5)),
    "token a flag": lambda s, i, k: replace(s, token_ids=_put(s.token_ids, i, True)),
    "log-prob lost": lambda s, i, k: replace(s, logprobs=s.logprobs[:i] + s.logprobs[i + 1 :]),
    "log-prob nan": lambda s, i, k: replace(s, logprobs=_put(s.logprobs, i, math.nan)),
    "log-prob -inf": lambda s, i, k: replace(s, logprobs=_put(s.logprobs, i, -math.inf)),
    "log-prob +inf": lambda s, i, k: replace(s, logprobs=_put(s.logprobs, i, math.inf)),
    "log-prob above 0": lambda s, i, k: replace(s, logprobs=_put(s.logprobs, i, 0.01)),
    "mask too short": lambda s, i, k: replace(s, loss_mask=(1,) * (len(s.token_ids) - 1)),
    "mask of 2": lambda s, i, k: replace(s, loss_mask=_put((1,) * len(s.token_ids), i, 2)),
    "aborted": lambda s, i, k: replace(s, finish="abort"),
    "no spans": lambda s, i, k: replace(s, spans=()),
    "span lost": lambda s, i, k: replace(s, spans=s.spans[:k] + s.spans[k + 1 :]),
    "span twice": lambda s, i, k: replace(s, spans=(*s.spans[:k], s.spans[k], *s.spans[k:])),
    "gap": lambda s, i, k: _span(s, k, start=s.spans[k].start + 1),
    "overlap": lambda s, i, k: _span(s, k, start=s.spans[k].start - 1),
    "end short": lambda s, i, k: _span(s, k, end=s.spans[k].end - 1),
    "end beyond": lambda s, i, k: _span(s, k, end=s.spans[k].end + 1),
    "empty span": lambda s, i, k: replace(
        s, spans=(*s.spans[:k], replace(s.spans[k], end=s.spans[k].start), *s.spans[k:])
    ),
    "span reversed": lambda s, i, k: _span(s, k, start=s.spans[k].end, end=s.spans[k].start),
    "foreign epoch": lambda s, i, k: _span(s, k, policy=PolicyId(EPOCH + 1, 0)),
    "old epoch": lambda s, i, k: _span(s, k, policy=PolicyId(EPOCH - 1, 99)),
    "foreign prefill": lambda s, i, k: replace(s, prefill=PolicyId(EPOCH - 1, 0)),
    "prefill after first token": lambda s, i, k: replace(
        s, prefill=PolicyId(EPOCH, s.spans[0].policy.update + 1)
    ),
    "policy decreases": lambda s, i, k: _span(
        s, k, policy=_older(s.spans[k - 1].policy if k else s.prefill)
    ),
}


def _span(sample: Sample, at: int, **changes) -> Sample:
    return replace(sample, spans=_put(sample.spans, at, replace(sample.spans[at], **changes)))


@pytest.mark.parametrize("name", CORRUPTIONS)
@examples(25)
@given(sample=samples(), data=st.data())
def test_one_corruption_anywhere_is_refused(name, sample, data):
    at = data.draw(st.integers(0, len(sample.token_ids) - 1))
    span = data.draw(st.integers(0, len(sample.spans) - 1))
    broken = CORRUPTIONS[name](sample, at, span)
    with pytest.raises(ContractViolation, match="sample refused: ") as caught:
        check(broken)
    assert caught.value.detail["num_tokens"] == len(broken.token_ids)


@examples(40)
@given(groups())
def test_a_group_is_as_old_as_its_oldest_token(group):
    updates = [span.policy.update for sample in group.samples for span in sample.spans]
    assert group.oldest == PolicyId(EPOCH, min(updates))
    for sample in group.samples:
        assert sample.is_mixed == (len({span.policy for span in sample.spans}) > 1)


@examples(40)
@given(groups(rewarded=False))
def test_a_sample_without_reward_does_not_reach_the_trainer(group):
    if any(sample.reward is None for sample in group.samples):
        with pytest.raises(ContractViolation, match="unrewarded"):
            _ = group.rewards
    else:
        assert group.is_equal == (len(set(group.rewards)) == 1)


@examples(60)
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_prompt_ids_are_read_as_they_are_written(pass_, index):
    assert PromptId.parse(str(PromptId(pass_, index))) == PromptId(pass_, index)


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":1", "1:-1", " 1:1", "1:1:1", "1_0:1", "a:b", "1:1\n"]
)
def test_nothing_else_is_a_prompt_id(text):
    with pytest.raises(ValueError, match="not a prompt id"):
        PromptId.parse(text)
