"""Choices of experts: what an engine tells, checked and kept compactly."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.collections import read_collection, write_collection
from runtime.data.routed import RoutedExperts, RouterShape
from runtime.data.samples import Collection, Group, Prompt, PromptId, Sample, Span
from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.engines.wire import generate_body, generations
from runtime.errors import ContractViolation
from runtime.policy import PolicyId
from runtime.rollout.requests import join

P1, P2 = PolicyId(1, 1), PolicyId(1, 2)
SHAPE = RouterShape(layers=2, top_k=2, experts=4)
shapes = st.builds(
    RouterShape, layers=st.integers(1, 3), top_k=st.integers(1, 3), experts=st.integers(3, 400)
)


def choices(num_rows: int, shape: RouterShape, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [
        [rng.permutation(shape.experts)[: shape.top_k] for _ in range(shape.layers)]
        for _ in range(num_rows)
    ]
    return np.array(rows, np.int32).reshape(num_rows, shape.layers, shape.top_k)


def wire(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


@given(shape=shapes, num_tokens=st.integers(1, 9))
def test_choices_come_back_as_they_were(shape, num_tokens):
    rows = choices(num_tokens - 1, shape)
    routed = RoutedExperts.decode(wire(rows), num_tokens=num_tokens, shape=shape)
    assert routed.num_rows == num_tokens - 1
    assert (routed.rows() == rows).all()
    # A quarter, or half, of what travelled.
    assert len(routed.data) == rows.size * (1 if shape.experts <= 256 else 2)


ROWS = choices(6, SHAPE)


def changed(at: tuple[int, int, int], value: int) -> np.ndarray:
    rows = ROWS.copy()
    rows[at] = value
    return rows


WRONG = {
    "missing": None,
    "no base64": "***",
    "a row too few": wire(ROWS[:-1]),
    "a row too many": wire(choices(7, SHAPE)),
    "an expert too high": wire(changed((3, 1, 0), 4)),
    "an expert below none": wire(changed((0, 0, 1), -1)),
    "twice the same": wire(changed((5, 1, 0), int(ROWS[5, 1, 1]) or 1).copy()),
}
if ROWS[5, 1, 1] == 0:  # zeros everywhere stand for a layer without a router
    WRONG.pop("twice the same")


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_refused(what):
    with pytest.raises(ContractViolation):
        RoutedExperts.decode(WRONG[what], num_tokens=7, shape=SHAPE)


def test_a_dense_layer_of_a_sparse_model_is_zeros():
    rows = ROWS.copy()
    rows[:, 0] = 0
    routed = RoutedExperts.decode(wire(rows), num_tokens=7, shape=SHAPE)
    assert (routed.rows() == rows).all()


def answer(prompt: int, tokens: int, policy: PolicyId, rows: np.ndarray | None) -> dict:
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": prompt,
        "weight_version": str(policy),
        "output_token_logprobs": [[-0.5, t, None] for t in range(tokens)],
    }
    if rows is not None:
        meta["routed_experts"] = wire(rows)
    return {"output_ids": list(range(tokens)), "meta_info": meta}


def test_choices_are_asked_for_and_checked_against_the_response():
    request = GenerateRequest(
        rid="r", input_ids=(1, 2), sampling=SamplingSettings(max_new_tokens=4), router=SHAPE
    )
    assert generate_body(request)["return_routed_experts"] is True
    (got,) = generations(answer(3, 4, P1, ROWS), n=1, router=SHAPE)
    assert (got.routed.rows() == ROWS).all()
    # A server without its flag answers 200 and leaves the field out.
    with pytest.raises(ContractViolation, match="though it was asked"):
        generations(answer(3, 4, P1, None), n=1, router=SHAPE)
    (plain,) = generations(answer(3, 4, P1, None), n=1)
    assert plain.routed is None


def test_a_continued_response_keeps_the_choices_that_its_tokens_came_from():
    head_rows, tail_rows = choices(5, SHAPE, 1), choices(8, SHAPE, 2)
    (head,) = generations(answer(3, 3, P1, head_rows), n=1, router=SHAPE)
    (tail,) = generations(answer(6, 3, P2, tail_rows), n=1, router=SHAPE)
    joined: Generation = join(head, tail)
    assert joined.routed.num_rows == 3 + 6 - 1
    assert (joined.routed.rows()[:5] == head_rows).all()
    assert (joined.routed.rows()[5:] == tail_rows[5:]).all()


def test_choices_are_stored_with_their_sample(tmp_path):
    routed = RoutedExperts.decode(wire(ROWS), num_tokens=7, shape=SHAPE)
    plain = Sample(
        token_ids=(1, 2, 3, 4), logprobs=(-1.0,) * 4, spans=(Span(0, 4, P1),), prefill=P1,
        finish="length", reward=1.0,
    )  # fmt: skip
    recorded = Sample(
        token_ids=(1, 2, 3, 4), logprobs=(-1.0,) * 4, spans=(Span(0, 4, P1),), prefill=P1,
        finish="length", reward=0.0, routed=routed,
    )  # fmt: skip
    prompt = Prompt(id=PromptId(0, 0), token_ids=(7, 8, 9), text="x", answer=None, verifier="none")
    group = Group(prompt=prompt, attempt=1, samples=(plain, recorded))
    collection = Collection(id=1, groups=(group,), taken_at=P1)
    write_collection(tmp_path / "c.parquet", collection)
    assert read_collection(tmp_path / "c.parquet") == collection
