"""``/generate`` over HTTP: what is answered, and the facts beside it, the same for all engines."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engines.keepalive import SERVER_KEEPALIVE_S
from runtime.engines.scoring import ScoreRequest
from runtime.engines.scoring_client import HttpScoringClient
from tests.contracts.conftest import Models, RunningEngine, only_on
from tests.contracts.generating import GREEDY, assert_version, generate
from tests.contracts.lane import LANE, assert_logprobs
from tests.contracts.tiny_models import CONTEXT, VOCAB, byte_tokenizer, reference_logprobs

pytestmark = pytest.mark.anyio


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
