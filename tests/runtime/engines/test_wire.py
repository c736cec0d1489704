"""Answers of ``/generate`` that must not become samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from runtime.data.samples import Span
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.engines.wire import aborted_early, generate_body, generations
from runtime.errors import ContractViolation, OverloadError
from runtime.policy import PolicyId


def answer(**meta: Any) -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": [4, 5, 6],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 2,
            "weight_version": "e1.u3",
            "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None], [-1.0, 6, None]],
            "weight_versions": [
                {"version": "e1.u2", "start": 0, "end": 1},
                {"version": "e1.u3", "start": 1, "end": 3},
            ],
            **meta,
        },
    }


def test_a_mixed_response_keeps_its_spans_and_names_the_oldest_as_prefill():
    (found,) = generations(answer(), n=1)
    assert found.token_ids == (4, 5, 6)
    assert found.logprobs == (-0.5, -0.25, -1.0)
    assert found.spans == (Span(0, 1, PolicyId(1, 2)), Span(1, 3, PolicyId(1, 3)))
    assert found.prefill == PolicyId(1, 2)
    assert found.finish == "length"


def test_an_engine_without_spans_gives_one():
    sample = answer()
    del sample["meta_info"]["weight_versions"]
    (found,) = generations(sample, n=1)
    assert found.spans == (Span(0, 3, PolicyId(1, 3)),)


def test_an_abort_in_the_queue_is_an_empty_response():
    sample = answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    sample["output_ids"] = []
    del sample["meta_info"]["output_token_logprobs"]
    (found,) = generations(sample, n=1)
    assert (found.token_ids, found.spans, found.finish) == ((), (), "abort")
    assert found.abort_message == "Abort in waiting queue"


def spans(*edges: tuple[int, int]) -> list[dict[str, object]]:
    return [{"version": "e1.u3", "start": a, "end": b} for a, b in edges]


SPOILED: list[dict[str, Any]] = [
    {"weight_versions": spans((0, 1), (2, 3))},
    {"weight_versions": spans((0, 2), (1, 3))},
    {"weight_versions": spans((0, 2))},
    {"weight_versions": spans((0, 4))},
    {"weight_versions": spans((0, 0), (0, 3))},
    {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
    {"weight_versions": [{"start": 0, "end": 3}]},
    {"weight_versions": None, "weight_version": "default"},
    {"output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]]},
    {"output_token_logprobs": [[-0.5, 4, None], [-0.25, 6, None], [-1.0, 5, None]]},
    {"output_token_logprobs": [[None, 4, None], [-0.25, 5, None], [-1.0, 6, None]]},
    {"output_token_logprobs": [[float("nan"), 4, None], [-0.25, 5, None], [-1.0, 6, None]]},
    {"output_token_logprobs": None},
    {"finish_reason": None},
    {"finish_reason": {"type": "eaten"}},
    {"prompt_tokens": None},
]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_an_answer_outside_the_contract_is_fatal(spoiled: dict[str, Any]):
    with pytest.raises(ContractViolation):
        generations(answer(**spoiled), n=1)


@pytest.mark.parametrize("body", [None, "", [], {}, {"meta_info": {}}, [answer()] * 2, 7])
def test_another_shape_or_number_is_fatal(body: Any):
    with pytest.raises(ContractViolation):
        generations(copy.deepcopy(body), n=3)


def test_one_refused_sibling_fails_the_call_with_its_own_class():
    refused = answer(
        finish_reason={
            "type": "abort",
            "status_code": 503,
            "message": "The request queue is full.",
        }
    )
    with pytest.raises(OverloadError):
        generations([answer(), refused], n=2)


def test_a_body_names_what_was_asked():
    body = generate_body(
        GenerateRequest(
            rid="r",
            input_ids=(1, 2),
            n=3,
            salt="e1.u2",
            sampling=SamplingSettings(
                max_new_tokens=7, temperature=0.5, stop_token_ids=(9,), stop=("x",), seed=5
            ),
        )
    )
    assert body == {
        "rid": "r",
        "input_ids": (1, 2),
        "return_logprob": True,
        "extra_key": "e1.u2",
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "ignore_eos": False,
            "n": 3,
            "stop_token_ids": (9,),
            "stop": ("x",),
            "sampling_seed": 5,
        },
    }


def test_an_abort_in_the_queue_is_read_as_sglang_tells_it():
    """Neither prompt tokens nor log-probs: it may be continued from where it was."""
    told = {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "e1.u3",
            "e2e_latency": 0.2,
            "completion_tokens": 0,
        },
    }
    (found,) = generations(told, n=1)
    assert (found.finish, found.token_ids, found.spans) == ("abort", (), ())
    assert (found.prefill, found.prompt_tokens) == (PolicyId(1, 3), 0)


@pytest.mark.parametrize("status", [400, 499])
def test_an_abort_before_the_decoder_is_an_empty_partial_and_no_failure(status):
    request = GenerateRequest(
        rid="e1-0:3-1-2", input_ids=(1, 2), sampling=SamplingSettings(max_new_tokens=4), n=3
    )
    body = {"error": {"message": "Request e1-0:3-1-2 was aborted"}}
    answers = aborted_early(status, body, request)
    assert answers is not None
    assert [(a.finish, a.token_ids, a.spans) for a in answers] == [("abort", (), ())] * 3
    other = {"error": {"message": "Request e1-0:4-1-2 was aborted"}}
    assert aborted_early(status, other, request) is None
    assert aborted_early(200, body, request) is None


def test_a_request_aborted_while_it_waited_needs_no_other_fields():
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    answer = {"text": "", "output_ids": [], "meta_info": {"id": "r", "finish_reason": finish}}
    (got,) = generations(answer, n=1)
    assert (got.finish, got.token_ids, got.abort_message) == ("abort", (), finish["message"])
