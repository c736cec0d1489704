import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.evaluation.metrics import Judged, bootstrap_interval, pass_at_k, summarise


def brute_force(n: int, c: int, k: int) -> float:
    """Share of the k-subsets of n samples, c of them right, that hold a right one."""
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    return sum(any(subset) for subset in subsets) / len(subsets)


@st.composite
def draws(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(draws())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[int, int, int]) -> None:
    assert pass_at_k(*case) == pytest.approx(brute_force(*case), abs=1e-12)


@given(st.integers(2, 2000), st.data())
def test_pass_at_k_grows_with_k_and_c_and_stays_a_chance(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n - 1))
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(n, c, k + 1) >= value - 1e-12
    assert pass_at_k(n, c + 1, k) >= value - 1e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_means_nothing(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(0, 2**31))
def test_an_interval_repeats_with_its_seed_and_lies_within_the_values(
    values: list[float], seed: int
) -> None:
    found = bootstrap_interval(values, seed=seed, resamples=200)
    assert found == bootstrap_interval(values, seed=seed, resamples=200)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.value == pytest.approx(math.fsum(values) / len(values), abs=1e-9)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    covered = 0
    for seed in range(200):
        values = [float(rng.random() < 0.4) for _ in range(60)]
        found = bootstrap_interval(values, seed=seed, resamples=300, confidence=0.9)
        covered += found.low <= 0.4 <= found.high
    # Binomial(200, 0.9): five standard deviations are 21.
    assert 159 <= covered <= 200


def test_chunks_of_resampling_do_not_change_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.evaluation import metrics

    monkeypatch.setattr(metrics, "_MAX_DRAWS", 7)
    found = bootstrap_interval([0.0, 1.0, 1.0], seed=1, resamples=500)
    assert found.low <= 2 / 3 <= found.high


@pytest.mark.parametrize(("values", "confidence"), [([], 0.9), ([1.0], 1.0), ([1.0], 0.0)])
def test_nothing_to_resample_is_refused(values: list[float], confidence: float) -> None:
    with pytest.raises(ValueError, match="nothing to resample"):
        bootstrap_interval(values, seed=0, confidence=confidence)


def test_figures_are_means_over_prompts_not_over_samples() -> None:
    one = Judged(rewards=(1.0, 0.0), lengths=(2, 4), capped=(False, True))
    two = Judged(rewards=(1.0, 1.0, 1.0, 1.0), lengths=(8, 8, 8, 8), capped=(False,) * 4)
    found = summarise([one, two], pass_at=2, seed=0, num_missing=3)
    assert found["mean"] == pytest.approx(0.75)
    assert found["pass_at_1"] == pytest.approx(0.75)
    assert found["pass_at_2"] == pytest.approx(1.0)
    assert found["length_mean"] == pytest.approx((3 + 8) / 2)
    assert found["cap_share"] == pytest.approx(0.25)
    assert (found["num_prompts"], found["num_samples"], found["num_missing"]) == (2, 6, 3)
    assert found["mean_low"] <= found["mean"] <= found["mean_high"]


def test_a_missing_prompt_is_no_zero() -> None:
    item = Judged(rewards=(1.0,), lengths=(2,), capped=(False,))
    assert summarise([item], pass_at=1, seed=0, num_missing=5)["mean"] == 1.0
    assert set(summarise([], pass_at=1, seed=0, num_missing=5)) == {
        "num_prompts",
        "num_samples",
        "num_missing",
    }


def test_unequal_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="one of each per sample"):
        Judged(rewards=(1.0,), lengths=(1, 2), capped=(False,))
