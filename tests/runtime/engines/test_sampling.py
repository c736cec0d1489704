"""The draw: right probabilities, right log-probs, the same token for the same seed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engines.embedded.sampling import SamplingRows, sample, sibling_seed, uniforms

VOCAB = 24
NUM_DRAWS = 20_000
CHI_SQUARE_999 = {2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32, 23: 49.73}
"""99.9th percentile by degrees of freedom. Seeds are fixed, so a pass stays a pass."""


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def rows(num: int, **columns: float) -> SamplingRows:
    made = SamplingRows.empty(num)
    made.top_k[:] = VOCAB
    for name, value in columns.items():
        getattr(made, name)[:] = value
    made.filtered[:] = (made.top_k < VOCAB) | (made.top_p < 1) | (made.min_p > 0)
    return made


def draw(logits_V: torch.Tensor, made: SamplingRows, u: np.ndarray) -> tuple[torch.Tensor, ...]:
    return sample(logits_V.expand(len(u), -1).contiguous(), made, slice(0, len(u)), u)


def chi_square(tokens: torch.Tensor, prob_V: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    possible = prob_V > 0
    assert counts[~possible].sum() == 0
    expected = prob_V[possible].double() * len(tokens)
    return float(((counts[possible] - expected) ** 2 / expected).sum())


def stream(num: int, seed: int = 7) -> np.ndarray:
    return uniforms(np.full(num, seed, np.uint64), np.arange(num, dtype=np.int64))


def test_draws_follow_the_softmax_at_the_temperature():
    for temperature in (1.0, 0.5, 2.0):
        tokens, logprobs = draw(
            logits(), rows(NUM_DRAWS, temperature=temperature), stream(NUM_DRAWS)
        )
        expected = torch.softmax(logits() / temperature, -1)
        assert chi_square(tokens, expected) < CHI_SQUARE_999[VOCAB - 1]
        torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-5, rtol=0)


def test_top_k_draws_follow_the_renormalised_softmax_and_keep_its_logprobs():
    tokens, logprobs = draw(logits(), rows(NUM_DRAWS, top_k=5), stream(NUM_DRAWS))
    whole = torch.softmax(logits(), -1)
    kept = torch.zeros(VOCAB).scatter(0, whole.topk(5).indices, 1.0) * whole
    assert chi_square(tokens, kept / kept.sum()) < CHI_SQUARE_999[4]
    torch.testing.assert_close(logprobs, whole.log()[tokens], atol=1e-5, rtol=0)


def test_top_p_draws_follow_the_smallest_set_that_reaches_p():
    whole, order = torch.softmax(logits(), -1).sort(descending=True)
    size = int((whole.cumsum(-1) < 0.6).sum()) + 1
    kept = torch.zeros(VOCAB).scatter(0, order[:size], whole[:size])
    tokens, _ = draw(logits(), rows(NUM_DRAWS, top_p=0.6), stream(NUM_DRAWS))
    assert size == 4
    assert chi_square(tokens, kept / kept.sum()) < CHI_SQUARE_999[size - 1]


def test_min_p_cuts_what_is_far_below_the_best():
    whole = torch.softmax(logits(), -1)
    kept = whole * (whole >= 0.2 * whole.max())
    tokens, _ = draw(logits(), rows(NUM_DRAWS, min_p=0.2), stream(NUM_DRAWS))
    freedom = int((kept > 0).sum()) - 1
    assert chi_square(tokens, kept / kept.sum()) < CHI_SQUARE_999[freedom]


def test_rows_of_one_batch_keep_their_own_settings():
    made = rows(4)
    made.greedy[0] = True
    made.temperature[1] = 1e-3
    made.top_k[2], made.filtered[2] = 1, True
    for u in stream(50):
        tokens, _ = draw(logits(), made, np.full(4, u, np.float32))
        assert tokens[:3].tolist() == [int(logits().argmax())] * 3
    assert len({int(draw(logits(), made, np.full(4, u, np.float32))[0][3]) for u in stream(50)}) > 5


def test_uniforms_are_uniform_along_a_seed_and_across_seeds():
    along = stream(NUM_DRAWS)
    seeds = np.arange(NUM_DRAWS, dtype=np.uint64)
    across = uniforms(seeds, np.zeros(NUM_DRAWS, np.int64))
    siblings = np.array([sibling_seed(3, i) for i in range(NUM_DRAWS)], np.uint64)
    for u in (along, across, uniforms(siblings, np.zeros(NUM_DRAWS, np.int64))):
        assert u.min() >= 0.0
        assert u.max() < 1.0
        counts = np.bincount((u * 8).astype(int), minlength=8)
        assert ((counts - NUM_DRAWS / 8) ** 2 / (NUM_DRAWS / 8)).sum() < CHI_SQUARE_999[7]
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.03


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    top_p=st.sampled_from([1.0, 0.9, 1e-6]),
    top_k=st.sampled_from([1, 2, VOCAB]),
    u=st.sampled_from([0.0, 0.25, 1.0 - 2.0**-24]),
)
def test_a_token_that_was_cut_off_is_never_drawn(
    seed: int, scale: float, top_p: float, top_k: int, u: float
):
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    tokens, logprobs = draw(values, rows(1, top_p=top_p, top_k=top_k), np.array([u], np.float32))
    whole, order = torch.softmax(values, -1).sort(descending=True)
    allowed = order[(torch.arange(VOCAB) < top_k) & (whole.cumsum(-1) - whole <= top_p + 1e-6)]
    assert int(tokens) in {*allowed.tolist(), int(values.argmax())}
    assert float(logprobs) <= 0.0
    assert bool(torch.isfinite(logprobs))


def test_broken_logits_give_a_token_inside_the_vocabulary_and_a_logprob_that_is_refused():
    tokens, logprobs = draw(torch.full((VOCAB,), float("nan")), rows(1), stream(1))
    assert 0 <= int(tokens) < VOCAB
    assert bool(torch.isnan(logprobs))
