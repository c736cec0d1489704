"""How many groups may be skipped before the run fails with the example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.samples import Prompt, PromptId
from runtime.errors import DataBudgetExceeded, RetryBy, VerifierCrashed
from runtime.rewards.budget import SkipBudget

PROMPT = Prompt(
    id=PromptId(1, 7), token_ids=(1,), text="What is 1 + 1?", answer="2", verifier="math"
)
ERROR = VerifierCrashed("it broke", response="two?")


def test_without_a_budget_the_first_failure_ends_the_run_with_its_example():
    with pytest.raises(DataBudgetExceeded) as caught:
        SkipBudget(0, 1000).charge(PROMPT, ERROR)
    for part in ("1:7", "What is 1 + 1?", "'2'", "it broke", "skip_budget"):
        assert part in str(caught.value)
    assert caught.value.retry is RetryBy.NOBODY
    assert caught.value.detail["response"] == "two?"
    assert caught.value.__cause__ is ERROR


@given(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]), st.integers(1, 10_000))
def test_the_budget_is_that_share_of_the_prompts_and_not_one_more(share, num_prompts):
    exact = {0.0: 0, 0.001: num_prompts // 1000, 0.1: num_prompts // 10, 0.5: num_prompts // 2}
    limit = exact.get(share, num_prompts)
    budget = SkipBudget(share, num_prompts, num_skipped=max(0, limit - 1))
    if limit:
        budget.charge(PROMPT, ERROR)
    with pytest.raises(DataBudgetExceeded):
        budget.charge(PROMPT, ERROR)
