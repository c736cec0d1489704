"""``/generate`` over HTTP: its answers and every refusal, the same for all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engines.answers import classify
from runtime.engines.keepalive import SERVER_KEEPALIVE_S
from runtime.engines.scoring import ScoreRequest
from runtime.engines.scoring_client import HttpScoringClient
from runtime.errors import OverloadError
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.lane import LANE, assert_logprobs
from tests.contracts.tiny_models import CONTEXT, VOCAB, byte_tokenizer, reference_logprobs

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
LONG: dict[str, object] = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": CONTEXT - 8, "ignore_eos": True},
    "return_logprob": True,
}
"""Runs for seconds unless somebody ends it."""


def generate(**fields: object) -> dict[str, object]:
    return {"input_ids": [1, 2, 3], "sampling_params": GREEDY, **fields}


def assert_version(engine: RunningEngine, meta: dict[str, Any], version: str, end: int) -> None:
    """All tokens of a response are of one version, as far as the engine says whose they are."""
    assert meta["weight_version"] == version
    spans = [{"version": version, "start": 0, "end": end}]
    assert meta.get("weight_versions") == (spans if engine.tells_spans else None)


async def test_answer_has_the_recorded_shape(engine_server: RunningEngine, models: Models):
    answer = await engine_server.post(
        "/generate", generate(rid="my-rid-1", return_logprob=True, logprob_start_len=0)
    )

    assert answer.status == 200
    assert set(answer.body) == {"text", "output_ids", "meta_info"}
    output, meta = answer.body["output_ids"], answer.body["meta_info"]
    assert meta["id"] == "my-rid-1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 4)
    assert_version(engine_server, meta, "default", 4)
    assert (meta["num_retractions"], meta["cached_tokens"]) == (0, 0)
    assert meta["output_token_logprobs_length"] == 4
    assert [t[1:] for t in meta["output_token_logprobs"]] == [[t, None] for t in output]
    given = meta["input_token_logprobs"]
    assert [t[1] for t in given] == [1, 2, 3]
    assert given[0][0] is None
    expected = reference_logprobs(models.models["a"], [1], [2, 3, *output])
    found = [t[0] for t in [*given[1:], *meta["output_token_logprobs"]]]
    assert_logprobs(found, expected)


async def test_a_given_response_is_scored_with_its_likeliest_alternatives(
    engine_server: RunningEngine, models: Models
):
    """What a served teacher is asked: nothing of the prompt, everything of the response."""
    prompt, response = (1, 2, 3), (7, 260, 9, 258)
    with torch.inference_mode():
        logits = models.models["a"](torch.tensor([[*prompt, *response]])).logits[0].float()
    logprob_TV = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    async with HttpScoringClient(
        engine_server.url, api_key=engine_server.api_key, vocab_size=VOCAB
    ) as client:
        for top_k in (0, 1, 5):
            request = ScoreRequest(
                rid=f"s{top_k}", prompt_ids=prompt, token_ids=response, top_k=top_k
            )
            found = await client.score(request, deadline_s=60)
            values, ids = found.arrays(len(response))
            if top_k == 0:
                want = logprob_TV.gather(1, torch.tensor(response)[:, None]).squeeze(1)
            else:
                want = logprob_TV.topk(top_k, -1).values.flatten()
                places = torch.arange(len(response)).repeat_interleave(top_k)
                # The echoed id of each value is really that token's.
                named = logprob_TV[places, torch.from_numpy(ids.astype(np.int64))]
                assert_logprobs(named, want)
            assert_logprobs(torch.from_numpy(values.copy()), want)
        read = await client.score_text("hello", rid="t", deadline_s=60)
    expected = reference_logprobs(models.models["a"], [read.token_ids[0]], [*read.token_ids[1:]])
    assert_logprobs(torch.tensor(read.logprobs), expected)
    assert read.token_ids == tuple(byte_tokenizer().encode("hello").ids)


async def test_greedy_tokens_are_those_of_hf_generate(engine_server: RunningEngine, models: Models):
    prompts = [[5], [7, 8], list(range(40)), [9] * 17]
    params = {**GREEDY, "max_new_tokens": 12}
    answer = await engine_server.post(
        "/generate", {"input_ids": prompts, "sampling_params": params}
    )

    for prompt, sample in zip(prompts, answer.body, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            expected = models.models["a"].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
            )
        if LANE.dtype == torch.float32:
            assert sample["output_ids"] == expected[0, len(prompt) :].tolist()
        else:  # near ties fall as rounding has it
            assert_likeliest(models.models["a"], prompt, sample["output_ids"])


def assert_likeliest(model: Any, prompt: list[int], output: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0].float()
    best = logits.log_softmax(-1).amax(-1)[len(prompt) - 1 : -1]
    assert_logprobs(reference_logprobs(model, prompt, output), best)


async def test_logprobs_are_those_of_the_sampling_temperature_before_top_p(
    engine_server: RunningEngine, models: Models
):
    params = {"temperature": 0.6, "top_p": 0.5, "max_new_tokens": 24, "ignore_eos": True}
    answer = await engine_server.post(
        "/generate", generate(sampling_params=params, return_logprob=True)
    )

    output = answer.body["output_ids"]
    found = torch.tensor([t[0] for t in answer.body["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["a"], [1, 2, 3], output, temperature=0.6)
    assert_logprobs(found, expected)


async def test_n_samples_share_the_prompt_and_differ(engine_server: RunningEngine):
    params = {"max_new_tokens": 8, "n": 5, "ignore_eos": True}
    answer = await engine_server.post("/generate", generate(sampling_params=params))

    assert len(answer.body) == 5
    assert len({tuple(s["output_ids"]) for s in answer.body}) == 5
    cached = sorted(s["meta_info"]["cached_tokens"] for s in answer.body)
    # SGLang reads the prompt once before, and counts it for nobody.
    assert cached == ([0, 2, 2, 2, 2] if engine_server.kind == "embedded" else [2] * 5)


@only_on("embedded", "SGLang keeps seeds only with enable_deterministic_inference")
async def test_a_seed_fixes_the_response_whatever_shares_the_batch(engine_server: RunningEngine):
    params = {"max_new_tokens": 8, "sampling_seed": 11, "ignore_eos": True}
    alone = await engine_server.post("/generate", generate(sampling_params=params))
    crowd = [
        engine_server.post("/generate", generate(sampling_params={**params, "sampling_seed": seed}))
        for seed in (11, 12, 13, 14)
    ]
    together = await asyncio.gather(*crowd)

    assert together[0].body["output_ids"] == alone.body["output_ids"]
    assert together[1].body["output_ids"] != alone.body["output_ids"]


async def test_stop_ids_end_a_response_and_belong_to_it(engine_server: RunningEngine):
    # SGLang's ignore_eos would go for these as well.
    params = {**GREEDY, "max_new_tokens": 12, "ignore_eos": False}
    free = (await engine_server.post("/generate", generate(sampling_params=params))).body[
        "output_ids"
    ]
    assert len(free) > 3
    stop = free[3]
    stopped = await engine_server.post(
        "/generate", generate(sampling_params={**params, "stop_token_ids": [stop]})
    )

    assert stopped.body["output_ids"] == free[: free.index(stop) + 1]
    assert stopped.body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_text_in_and_out(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", {"text": "hi", "sampling_params": GREEDY})

    assert answer.body["meta_info"]["prompt_tokens"] == 2
    assert answer.body["text"]


async def test_stop_texts_are_cut_from_the_text_only(engine_server: RunningEngine):
    params = {**GREEDY, "max_new_tokens": 30}
    free = (await engine_server.post("/generate", generate(sampling_params=params))).body
    letters = [c for c in free["text"] if c.isascii() and c.isprintable()]
    stop = letters[1]
    answer = await engine_server.post(
        "/generate", generate(sampling_params={**params, "stop": [stop]})
    )

    assert answer.body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer.body["text"] == free["text"][: free["text"].index(stop)]
    count = len(answer.body["output_ids"])
    assert answer.body["output_ids"] == free["output_ids"][:count]


@only_on("embedded", "SGLang takes the ids; our client sends nothing but ids")
async def test_both_inputs_take_the_text(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", generate(text="hello"))
    assert answer.status == 200
    assert answer.body["meta_info"]["prompt_tokens"] == 5


async def test_no_new_tokens_is_a_length(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", generate(sampling_params={"max_new_tokens": 0}))
    assert answer.status == 200
    assert answer.body["output_ids"] == []
    assert answer.body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


async def test_unknown_top_level_keys_and_routed_experts_are_ignored(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", generate(foo=1, return_routed_experts=True))
    assert answer.status == 200
    assert "routed_experts" not in answer.body["meta_info"]


async def test_stream_is_cumulative_and_ends_with_spans(engine_server: RunningEngine):
    async with engine_server.stream(
        generate(sampling_params={**GREEDY, "max_new_tokens": 20})
    ) as s:
        assert s.status == 200
        events = await s.rest()

    counts = [len(e["output_ids"]) for e in events]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    whole = events[-1]["output_ids"]
    assert all(e["output_ids"] == whole[: len(e["output_ids"])] for e in events)
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * (
        len(events) - 1
    ) + [False]
    assert_version(engine_server, events[-1]["meta_info"], "default", 20)


# Refusals

BAD_VALUES: list[tuple[dict[str, object], str]] = [
    (
        {"sampling_params": {"temperature": -1}},
        "temperature must be a non-negative finite number, got -1.",
    ),
    ({"sampling_params": {"top_p": 1.5}}, "top_p must be in (0, 1], got 1.5."),
    ({"input_ids": None}, "Either text, input_ids or input_embeds should be provided."),
    ({"input_ids": []}, "input_ids cannot be empty."),
    (
        {"input_ids": [1] * (CONTEXT + 1)},
        (
            f"The input ({CONTEXT + 1} tokens) is longer than the model's context length "
            f"({CONTEXT} tokens)."
        ),
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD_VALUES)
async def test_bad_values_have_the_message_envelope(
    engine_server: RunningEngine, fields: dict[str, object], message: str
):
    answer = await engine_server.post("/generate", {**generate(), **fields})
    assert (answer.status, answer.body) == (400, {"error": {"message": message}})


async def test_prompt_and_response_over_the_context_are_refused(engine_server: RunningEngine):
    answer = await engine_server.post(
        "/generate", generate(sampling_params={"max_new_tokens": CONTEXT})
    )
    assert answer.status == 400
    assert answer.body["error"]["message"].startswith(
        f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens. "
        f"You requested a total of {CONTEXT + 3} tokens: 3 tokens from the input messages and "
        f"{CONTEXT} tokens for the completion. Please reduce "
    )


async def test_unknown_sampling_key_has_the_text_envelope(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", generate(sampling_params={"foo": 1}))
    if not engine_server.names_unknown_fields:
        assert (answer.status, answer.body) == (500, "Internal Server Error")
        return
    assert answer.status == 400
    assert answer.body["error"].startswith("unknown field `foo`, expected one of `max_new_tokens`")


@pytest.mark.parametrize("body", [b"{", b"[1,", b'{"input_ids": [1,]}'])
async def test_broken_json_has_the_validation_envelope(engine_server: RunningEngine, body: bytes):
    answer = await engine_server.call("POST", "/generate", body)
    assert answer.status == 400
    assert (answer.body["object"], answer.body["type"]) == ("error", "Bad Request")
    assert (answer.body["param"], answer.body["code"]) == (None, 400)
    assert "json_invalid" in answer.body["message"]


async def test_wrong_type_has_the_validation_envelope(engine_server: RunningEngine):
    answer = await engine_server.post("/generate", generate(input_ids="abc"))
    assert answer.status == 400
    assert answer.body["object"] == "error"
    assert "must be list or null; got str" in answer.body["message"]


@only_on("embedded", "SGLang's server ends; tests/runtime/engines/test_sglang_owner.py has it")
@pytest.mark.parametrize("bad", [VOCAB, 99999, -1])
async def test_ids_outside_the_vocabulary_leave_the_server_alive(
    engine_server: RunningEngine, bad: int
):
    """Upstream dies here; its own client refuses such ids before they are sent."""
    answer = await engine_server.post("/generate", generate(input_ids=[1, bad]))
    assert answer.status == 400
    assert (await engine_server.get("/health_generate")).status == 200


async def test_unknown_paths_and_methods(engine_server: RunningEngine):
    # Gone upstream; an older one still says what took its place.
    assert (await engine_server.get("/get_weight_version")).status == 404
    nowhere = await engine_server.get("/nowhere")
    assert (nowhere.status, nowhere.body) == (404, {"detail": "Not Found"})
    wrong = await engine_server.get("/generate")
    assert (wrong.status, wrong.body) == (405, {"detail": "Method Not Allowed"})


async def test_duplicate_id_is_refused_while_the_first_runs(engine_server: RunningEngine):
    async with engine_server.stream({**LONG, "rid": "dup"}) as running:
        await running.tokens(1)
        answer = await engine_server.post("/generate", generate(rid="dup"))
        assert (answer.status, answer.body) == (
            400,
            {"error": {"message": "Duplicate request ID detected: dup"}},
        )


QUEUE_FULL = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "503",
    "param": None,
    "code": 503,
}


async def test_full_queue_refuses_with_503(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, max_queued_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            # SGLang answers nothing to a stream that waits: not even that it is one.
            waits = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "waits"}))
            await engine.until(waiting=1, running=1)
            refused = await engine.post("/generate", generate())
            pair = await engine.post("/generate", generate(sampling_params={**GREEDY, "n": 2}))
            async with engine.stream(generate()) as streamed:
                events = await streamed.rest()
            await engine.post("/abort_request", {"abort_all": True})
            await waits

    assert (refused.status, refused.body) == (503, QUEUE_FULL)
    assert (pair.status, pair.body) == (503, QUEUE_FULL)
    assert isinstance(classify(refused.status, refused.body), OverloadError)
    assert streamed.status == 200
    (event,) = events
    assert (event["text"], event["output_ids"]) == ("", [])
    reason = event["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert reason["message"] == "The request queue is full."


async def test_health_while_the_queue_is_full(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, max_queued_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            waits = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "waits"}))
            await engine.until(waiting=1, running=1)
            for path in ("/health", "/health_generate"):
                answer = await engine.get(path)
                assert (answer.status, answer.body) == (200, "")
            await engine.post("/abort_request", {"abort_all": True})
            await waits


async def test_more_samples_than_the_queue_holds_are_refused_whole(
    start_engine: Callable[..., Any],
):
    with start_engine(max_running_requests=4, max_queued_requests=1) as engine:
        answer = await engine.post("/generate", generate(sampling_params={**GREEDY, "n": 2}))
        assert (answer.status, answer.body) == (503, QUEUE_FULL)
        assert (await engine.post("/generate", generate())).status == 200


async def test_waiting_too_long_is_a_503(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1, waiting_timeout_s=0.05) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            answer = await engine.post("/generate", generate())
    assert answer.status == 503
    assert answer.body == {**QUEUE_FULL, "message": "Request waiting timeout reached."}


async def test_running_too_long_is_a_503(start_engine: Callable[..., Any]):
    with start_engine(running_timeout_s=0.05) as engine:
        answer = await engine.post("/generate", {**LONG})
    assert answer.status == 503
    assert answer.body == {**QUEUE_FULL, "message": "Request running timeout reached."}


# Aborts


async def test_abort_of_a_running_request_gives_what_it_has(
    engine_server: RunningEngine, models: Models
):
    async with engine_server.stream({**LONG, "rid": "mine"}) as running:
        await running.tokens(3)
        answer = await engine_server.post("/abort_request", {"rid": "mine"})
        assert (answer.status, answer.body) == (200, "")
        last = await running.last()

    assert last["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    output = last["output_ids"]
    assert 3 <= len(output) < CONTEXT - 8
    found = torch.tensor([t[0] for t in last["meta_info"]["output_token_logprobs"]])
    expected = reference_logprobs(models.models["a"], [1, 2, 3], output)
    assert_logprobs(found, expected)


async def test_abort_of_a_waiting_request_has_no_logprobs(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
            waiting = asyncio.ensure_future(engine.post("/generate", {**LONG, "rid": "w"}))
            await engine.until(waiting=1, running=1)
            await engine.post("/abort_request", {"rid": "w"})
            answer = await waiting

    assert answer.status == 200
    assert answer.body["output_ids"] == []
    meta = answer.body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert not meta.get("output_token_logprobs")


async def test_a_client_that_leaves_frees_its_place(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=1) as engine:
        async with engine.stream(LONG) as running:
            await running.tokens(1)
        assert (await engine.post("/generate", generate())).status == 200


async def test_unknown_ids_and_prefixes_abort_nothing(engine_server: RunningEngine):
    async with engine_server.stream({**LONG, "rid": "abcdef"}) as running:
        first = await running.tokens(1)
        for rid in ("abc", "other", ""):
            assert (await engine_server.post("/abort_request", {"rid": rid})).status == 200
        await running.tokens(len(first["output_ids"]) + 2)


async def test_abort_all_ends_everything(start_engine: Callable[..., Any]):
    with start_engine(max_running_requests=2) as engine:
        calls = [asyncio.ensure_future(engine.post("/generate", LONG)) for _ in range(5)]
        await engine.until(waiting=3, running=2)
        await engine.post("/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*calls)
        kinds = sorted(a.body["meta_info"]["finish_reason"]["message"] for a in answers)
        assert kinds == ["Abort in waiting queue"] * 3 + ["Aborted"] * 2
        await engine.until(waiting=0, running=0)


async def test_facts(engine_server: RunningEngine):
    for path in ("/server_info", "/get_server_info"):
        info = (await engine_server.get(path)).body
        assert info["status"] == "ready"
        assert info["max_req_input_len"] < CONTEXT
        assert "internal_states" in info
        assert "version" in info
        assert not any(name.endswith("api_key") and value for name, value in info.items())
    ours = (await engine_server.get("/milepost")).body
    assert (ours["contract"], ours["vocab_size"], ours["context_length"]) == (1, VOCAB, CONTEXT)
    assert ours.get("hash", "sha256") == LANE.hash
    assert ours["keepalive_s"] == SERVER_KEEPALIVE_S  # upstream's own is 5 s: it got ours
    for path in ("/model_info", "/get_model_info"):
        assert (await engine_server.get(path)).body["weight_version"] == "default"
    loads = (await engine_server.get("/v1/loads")).body["loads"]
    assert loads[0]["num_running_reqs"] == loads[0]["num_waiting_reqs"] == 0
    assert loads[0]["token_usage"] == 0.0
