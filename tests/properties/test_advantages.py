import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.trainer.advantages import group_advantages, is_equal_group, reinforce_advantages

no_deadline = settings(deadline=None, max_examples=60)  # other work shares the cores

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@no_deadline
@given(rewards)
def test_advantages_of_a_group_cancel(values: list[float]) -> None:
    for normalize in (True, False):
        advantages = group_advantages(values, normalize_std=normalize)
        scale = max(1.0, float(np.abs(advantages).max()))
        assert abs(float(advantages.astype(np.float64).sum())) <= 1e-5 * scale * len(values)


@no_deadline
@given(rewards)
def test_mixed_groups_keep_the_order_of_rewards(values: list[float]) -> None:
    advantages = group_advantages(values)
    by_reward = np.argsort(values, kind="stable")
    assert (np.diff(advantages[by_reward]) >= 0).all()


@no_deadline
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_reference_in_plain_arithmetic(values: list[float]) -> None:
    assume(max(values) != min(values))
    mean = sum(values) / len(values)
    std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    got = group_advantages(values)
    np.testing.assert_allclose(
        got, [(v - mean) / (std + 1e-6) for v in values], rtol=1e-4, atol=1e-6
    )


@no_deadline
@given(st.floats(-1e6, 1e6), st.integers(1, 40))
def test_equal_groups_are_exactly_zero(value: float, size: int) -> None:
    # Many values whose mean does not round to themselves: a std test would leave a tiny number.
    assert is_equal_group([value] * size)
    assert not group_advantages([value] * size).any()


def test_three_tenths_have_a_mean_that_rounds_and_still_give_zero() -> None:
    assert np.mean([0.1] * 3) != 0.1
    assert group_advantages([0.1] * 3).tolist() == [0.0, 0.0, 0.0]


def test_the_smallest_difference_makes_a_group_mixed() -> None:
    values = [1.0, float(np.nextafter(1.0, 2.0))]
    assert not is_equal_group(values)
    assert group_advantages(values)[1] > 0


@no_deadline
@given(st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 4)), min_size=2, max_size=6))
def test_samples_of_one_rollout_count_once(spec: list[tuple[float, int]]) -> None:
    plain = group_advantages([reward for reward, _ in spec])
    repeated = [(i, reward) for i, (reward, copies) in enumerate(spec) for _ in range(copies)]
    got = group_advantages([r for _, r in repeated], rollouts=[i for i, _ in repeated])
    assert got.tolist() == [plain[i] for i, _ in repeated]


def test_one_rollout_with_two_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="two rewards"):
        group_advantages([0.0, 1.0], rollouts=["a", "a"])


@pytest.mark.parametrize("bad", [[], [float("nan"), 1.0], [float("inf"), 0.0]])
def test_values_that_are_no_rewards_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(bad)


def test_reinforce_keeps_rewards() -> None:
    assert reinforce_advantages([0.0, 1.0], baseline=0.25).tolist() == [-0.25, 0.75]
