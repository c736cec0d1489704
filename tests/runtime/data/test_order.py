"""The order of prompts: every row once a pass, the same everywhere and for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.order import PromptOrder, permutation
from runtime.data.samples import PromptId
from tests.runtime.data.sample_strategies import examples


@examples(60)
@given(st.integers(1, 200), st.integers(1, 4), st.integers(-(2**70), 2**70), st.booleans())
def test_each_pass_asks_every_row_once(num_prompts, epochs, seed, shuffle):
    order = PromptOrder(num_prompts, epochs=epochs, seed=seed, shuffle=shuffle)
    asked = [order.at(i) for i in range(order.total)]
    for pass_ in range(epochs):
        of_pass = asked[pass_ * num_prompts : (pass_ + 1) * num_prompts]
        assert sorted(of_pass) == [PromptId(pass_, i) for i in range(num_prompts)]
        assert [p.index for p in of_pass] == order.rows(pass_).tolist()
        if not shuffle:
            assert of_pass == sorted(of_pass)


@examples(60)
@given(st.integers(1, 50), st.integers(0, 5), st.lists(st.integers(0, 149), max_size=20))
def test_looking_back_and_forth_changes_nothing(num_prompts, seed, positions):
    order = PromptOrder(num_prompts, epochs=3, seed=seed)
    for position in (p % order.total for p in positions):
        assert order.at(position) == PromptOrder(num_prompts, epochs=3, seed=seed).at(position)


def test_seeds_and_passes_give_other_orders():
    orders = {tuple(permutation(50, seed=s, pass_=p).tolist()) for s in range(5) for p in range(5)}
    assert len(orders) == 25


def test_the_order_of_a_run_begun_by_an_older_version_is_kept():
    # Recorded once: with another order, every run in progress would lose and double prompts.
    assert permutation(12, seed=17, pass_=0).tolist() == [10, 3, 9, 2, 6, 8, 1, 5, 11, 4, 7, 0]


def test_the_shuffle_is_fair():
    places = np.array([permutation(8, seed=s, pass_=0) for s in range(4000)])
    share = np.array([(places == row).mean(axis=0) for row in range(8)])
    assert np.abs(share - 1 / 8).max() < 0.03  # 5.7 standard deviations


@pytest.mark.parametrize(("num_prompts", "epochs"), [(0, 1), (1, 0), (-1, 1)])
def test_an_order_needs_prompts_and_passes(num_prompts, epochs):
    with pytest.raises(ValueError, match="prompts and passes"):
        PromptOrder(num_prompts, epochs=epochs)


@pytest.mark.parametrize("position", [-1, 6])
def test_positions_outside_are_refused(position):
    with pytest.raises(IndexError):
        PromptOrder(3, epochs=2).at(position)
