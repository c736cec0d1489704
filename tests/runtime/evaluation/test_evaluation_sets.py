from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import evaluation as section
from runtime.engines.protocol import SamplingSettings
from runtime.evaluation.sets import EvaluationSet

SET = EvaluationSet(
    name="held_out",
    prompts=Path("/data/held.jsonl"),
    recipe=None,
    num_prompts=64,
    verifier="exact_match",
    samples=4,
    pass_at=2,
    sampling=SamplingSettings(temperature=0.6, max_new_tokens=16),
    seed=7,
    required=None,
)


def test_the_digest_names_what_is_asked_and_not_where_it_lies() -> None:
    digest = SET.digest(prompts_fingerprint="f")
    assert replace(SET, prompts=Path("/elsewhere.jsonl")).digest(prompts_fingerprint="f") == digest
    assert replace(SET, required=True).digest(prompts_fingerprint="f") == digest
    others = [
        SET.digest(prompts_fingerprint="g"),
        SET.digest(prompts_fingerprint="f", verifier_version="2"),
        replace(SET, seed=8).digest(prompts_fingerprint="f"),
        replace(SET, samples=5).digest(prompts_fingerprint="f"),
        replace(SET, num_prompts=None).digest(prompts_fingerprint="f"),
        replace(SET, sampling=replace(SET.sampling, temperature=0.7)).digest(
            prompts_fingerprint="f"
        ),
    ]
    assert len({digest, *others}) == 1 + len(others)


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 64))
def test_seeds_repeat_and_fit_an_engine(seed: int, index: int, sample: int) -> None:
    one = replace(SET, seed=seed)
    assert 0 <= one.sample_seed(index, sample) < 2**31
    assert one.sample_seed(index, sample) == replace(one, name="x").sample_seed(index, sample)
    assert one.sample_seed(index, sample) != one.sample_seed(index, sample + 1)


def test_required_defaults_to_the_final_evaluation() -> None:
    assert SET.is_required("final")
    assert not SET.is_required("cadence")
    assert replace(SET, required=True).is_required("cadence")
    assert not replace(SET, required=False).is_required("final")


def test_a_section_takes_what_it_leaves_out_from_the_run() -> None:
    given_ = section.EvaluationSet(recipe="laptop", samples=2, pass_at=2, temperature=0.5)
    found = EvaluationSet.from_config(
        "x", given_, verifier="math", max_response_tokens=6, stop_token_ids=(3,)
    )
    assert (found.verifier, found.sampling.max_new_tokens) == ("math", 6)
    assert found.sampling.stop_token_ids == (3,)
    assert found.sampling.seed is None


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts or recipe"):
        replace(SET, recipe="laptop")
    with pytest.raises(ValueError, match="pass_at 5 of 4"):
        replace(SET, pass_at=5)
