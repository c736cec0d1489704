"""Every recorded body of the pinned engines, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engines.answers import classify, classify_foreign, finish_foreign, message_of, text_of
from runtime.errors import (
    ContractViolation,
    EngineRefused,
    GenerationTimeout,
    OverloadError,
    RetryBy,
    RunError,
    ServingError,
    TransportError,
    UnavailableError,
)


def openai(message: str, status: int, kind: str | None = None) -> dict[str, object]:
    kind = kind or str(status)
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def inner(message: str) -> dict[str, object]:
    return {"error": {"message": message}}


def router(code: str) -> dict[str, object]:
    return {"error": {"type": "Some Status", "code": code, "message": "as reqwest says it"}}


JSON_INVALID = "1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 8), 'msg': '...'}"
TOO_LONG = "The input (3000 tokens) is longer than the model's context length (2048 tokens)."

GENERATE: list[tuple[int, object, type[RunError]]] = [
    # SGLang 0.5.23 on a CPU, 0.5.17 on an H200: queue, priority, deadlines
    (503, openai("The request queue is full.", 503), OverloadError),
    (503, openai("The request is aborted by a higher priority request.", 503), OverloadError),
    (503, openai("Request waiting timeout reached.", 503), GenerationTimeout),
    (503, openai("Request running timeout reached.", 503), GenerationTimeout),
    (429, "", OverloadError),
    (429, openai("Too many requests", 429), OverloadError),
    # A bare or unknown 503 is broken configuration, not load
    (503, "", ContractViolation),
    (503, "Service Unavailable", ContractViolation),
    (503, {}, ContractViolation),
    (503, None, ContractViolation),
    (503, [], ContractViolation),
    (503, openai("The model is not loaded.", 503), ContractViolation),
    (503, inner("backend misconfigured"), ContractViolation),
    # Routers
    (503, "No available workers (all circuits open or unhealthy)", UnavailableError),
    (503, {"error": {"code": "no_healthy_workers", "message": "none"}}, UnavailableError),
    (503, {"error": {"type": "queue_full", "message": "full"}}, OverloadError),
    (503, {"error": {"code": "deadline_waiting", "message": "late"}}, GenerationTimeout),
    (503, {"error": {"code": "deadline_running", "message": "late"}}, GenerationTimeout),
    (503, {"error": {"code": "worker_connection_lost", "message": "reset"}}, TransportError),
    # sglang-router 0.3.2 (test_outside_router has it say them): about its own connection
    (503, router("no_available_workers"), UnavailableError),
    (500, router("call_upstream_request_error"), TransportError),
    (500, router("call_upstream_connection_failed"), TransportError),
    (500, router("call_upstream_body_error"), TransportError),
    (500, router("read_response_body_failed"), TransportError),
    (504, router("call_upstream_timeout"), GenerationTimeout),
    # and about what no second try mends
    (500, router("call_upstream_builder_error"), ContractViolation),
    (500, router("call_upstream_decode_error"), ContractViolation),
    (502, router("call_upstream_request_error"), ContractViolation),
    (503, router("call_upstream_request_error"), ContractViolation),
    (408, "", ContractViolation),
    # Bad requests in all three envelopes
    (400, inner(TOO_LONG), ContractViolation),
    (400, openai(TOO_LONG, 400, "BadRequestError"), ContractViolation),
    (400, inner("Requested token count exceeds the model's maximum ..."), ContractViolation),
    (400, inner("temperature must be a non-negative finite number, got -1."), ContractViolation),
    (400, inner("top_p must be in (0, 1], got 1.5."), ContractViolation),
    (400, inner("Either text, input_ids or input_embeds should be provided."), ContractViolation),
    (400, inner("input_ids cannot be empty."), ContractViolation),
    (400, inner("Duplicate request ID detected: dup"), ContractViolation),
    (
        400,
        inner(
            "recv_req.routed_experts_start_len=50 is higher than the number of input tokens "
            "len(req.origin_input_ids)=5. Please use a smaller routed_experts_start_len."
        ),
        ContractViolation,
    ),
    (400, {"error": "unknown field `foo`, expected one of `max_new_tokens`"}, ContractViolation),
    (400, openai(JSON_INVALID, 400, "Bad Request"), ContractViolation),
    (401, {"error": "Unauthorized"}, ContractViolation),
    (404, {"detail": "Not Found"}, ContractViolation),
    (405, {"detail": "Method Not Allowed"}, ContractViolation),
    (500, "Internal Server Error", ContractViolation),
    (502, "Bad Gateway", ContractViolation),
    (504, "Gateway Timeout", ContractViolation),
    # Words of overload under another status prove nothing
    (400, openai("The request queue is full.", 400), ContractViolation),
    (500, openai("The request queue is full.", 500), ContractViolation),
]


@pytest.mark.parametrize(("status", "body", "expected"), GENERATE)
def test_generate_answers(status: int, body: object, expected: type[RunError]):
    assert type(classify(status, body)) is expected


FINISHES: list[tuple[dict[str, object], type[RunError] | None]] = [
    ({"type": "length", "length": 4}, None),
    ({"type": "stop", "matched": 258}, None),
    ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, None),
    ({"type": "abort", "message": "Abort in waiting queue"}, None),
    # A full queue under stream comes as HTTP 200
    (
        {"type": "abort", "status_code": 503, "message": "The request queue is full."},
        OverloadError,
    ),
    (
        {
            "type": "abort",
            "status_code": 503,
            "message": "The request is aborted by a higher priority request.",
        },
        OverloadError,
    ),
    (
        {"type": "abort", "status_code": 503, "message": "Request waiting timeout reached."},
        GenerationTimeout,
    ),
    (
        {"type": "abort", "status_code": 503, "message": "Request running timeout reached."},
        GenerationTimeout,
    ),
    ({"type": "abort", "status_code": 429, "message": "slow down"}, OverloadError),
    ({"type": "abort", "status_code": 503, "message": "who knows"}, ContractViolation),
    ({"type": "abort", "status_code": 503}, ContractViolation),
    ({"type": "abort", "status_code": 400, "message": "Aborted"}, ContractViolation),
    ({"type": "abort", "message": "Something else"}, ContractViolation),
    ({"type": "eaten"}, ContractViolation),
    ({}, ContractViolation),
]


@pytest.mark.parametrize(("reason", "expected"), FINISHES)
def test_finish_reasons(reason: dict[str, object], expected: type[RunError] | None):
    found = classify(200, None, reason)
    assert type(found) is expected if expected else found is None


CONTROL: list[tuple[int, object, bool]] = [
    (200, {"success": True, "message": "Success Weight version updated to flat0."}, True),
    (200, {"message": "Generation paused successfully.", "status": "ok"}, True),
    (200, "", True),
    (200, None, True),
    (200, "Cache flushed.\nPlease check backend logs for more details.", True),
    (400, "Flush cache failed.\n", False),
    (400, {"success": False, "message": "Failed to get weights iterator: ..."}, False),
    (400, {"success": False, "message": "Weights were updated, but the cache was not ..."}, False),
    (400, {"success": False, "message": "a weight-update session is already open; ..."}, False),
    (400, {"success": False, "message": "NCCL error ... partially updated ..."}, False),
    (
        400,
        {
            "success": False,
            "message": "update_weights_from_tensor must run between begin_weight_update() and "
            "end_weight_update()",
        },
        False,
    ),
    (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to disk0.",
            "num_paused_requests": 0,
        },
        True,
    ),
    (200, {"message": "Generation continued successfully.", "status": "ok"}, True),
    (404, {"detail": "Not Found"}, False),
    # Two hundred, and nothing done
    (200, {"success": False, "message": "no"}, False),
    (503, "", False),
    (401, {"error": "Unauthorized"}, False),
]


@pytest.mark.parametrize(("status", "body", "is_fine"), CONTROL)
def test_control_answers(status: int, body: object, is_fine: bool):
    found = classify(status, body, call="control")
    assert found is None if is_fine else type(found) is EngineRefused


def test_the_three_envelopes_are_read():
    assert message_of(inner("a")) == message_of({"error": "a"}) == message_of(openai("a", 1)) == "a"
    assert message_of("a") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside),
    max_leaves=8,
)


@given(status=st.integers(201, 599).filter(lambda s: s not in (429, 503)), body=json_values)
def test_nothing_but_429_and_503_is_ever_retried(status: int, body: object):
    found = classify(status, body)
    assert isinstance(found, ContractViolation)
    assert found.retry is RetryBy.NOBODY


@given(body=json_values)
def test_no_unknown_503_is_retried_and_texts_are_bounded(body: object):
    found = classify(503, body)
    assert not isinstance(found, ServingError)
    assert len(text_of(body)) <= 500


PASSING = {429: OverloadError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError}


@given(
    status=st.integers(201, 599) | st.sampled_from(sorted(PASSING)),
    body=json_values | st.sampled_from([body for _, body, _ in GENERATE]),
    call=st.sampled_from(["generate", "control"]),
)
def test_of_a_foreign_server_only_what_a_gateway_says_is_read_otherwise(status, body, call):
    ours, found = (type(read(status, body, call=call)) for read in (classify, classify_foreign))
    wants = PASSING.get(status, ours)
    assert found is (ours if issubclass(ours, ServingError) else wants)


@pytest.mark.parametrize(("reason", "expected"), FINISHES)
def test_a_foreign_servers_abort_passes_unless_it_says_that_we_are_wrong(reason, expected):
    found = finish_foreign(reason)
    if reason.get("type") != "abort" or (expected and issubclass(expected, ServingError)):
        assert type(found) is (expected or type(None))
    else:
        is_ours = reason.get("status_code") == 400
        assert type(found) is (ContractViolation if is_ours else UnavailableError)
