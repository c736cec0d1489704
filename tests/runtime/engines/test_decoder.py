"""The decoder against HF's own forward, whatever joins, leaves or changes on the way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engines.embedded.cache import PrefillCache
from runtime.engines.embedded.decoder import Decoder
from runtime.engines.embedded.forward import HfForward, load_model, slot_cache
from runtime.engines.embedded.fused import fused_decode
from runtime.engines.embedded.requests import Request, SamplingParams
from runtime.engines.embedded.weights import Weights
from runtime.errors import UnavailableFeature
from tests.contracts.tiny_models import (
    VOCAB,
    reference_after_swap,
    reference_logprobs,
    tiny_llama,
    tiny_qwen3,
)

FAMILIES = {"qwen3": tiny_qwen3, "llama": tiny_llama}
_rid = itertools.count()


def request(prompt: list[int], max_new: int = 8, **changes: Any) -> Request:
    params = {
        "max_new_tokens": max_new, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "stop_token_ids": (), "stop": (), "seed": None, **changes,
    }  # fmt: skip
    return Request(rid=str(next(_rid)), prompt=tuple(prompt), params=SamplingParams(**params))


def decoder(model: Any, **changes: Any) -> Decoder:
    limits: dict[str, Any] = {
        "max_running": 8, "context_length": 256, "max_total_tokens": 4096, **changes
    }  # fmt: skip
    return Decoder(model.requires_grad_(False), **limits)


def run(made: Decoder) -> None:
    while made.num_running:
        made.step()


def assert_reference(model: Any, done: Request) -> None:
    expected = reference_logprobs(model, list(done.prompt), done.output)
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    return FAMILIES[request.param](3)


@pytest.mark.parametrize("use_fused", [True, False])
def test_greedy_is_hf_generate(model: Any, use_fused: bool):
    made = decoder(model, use_fused=use_fused)
    assert made.is_fused == use_fused
    prompts = [[5], [6, 7, 8], list(range(30)), [9] * 16, [1, 2]]
    requests = [request(p, 20, temperature=0.0) for p in prompts]
    made.admit(requests[:2])
    made.step()
    made.admit(requests[2:])
    run(made)
    for done in requests:
        ids = torch.tensor([done.prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert done.output == expected[0, len(done.prompt) :].tolist()
        assert_reference(model, done)


def test_the_written_out_step_equals_hf(model: Any):
    slots = slot_cache(model)
    slots.reserve(5, 32)
    hf = HfForward(model, slots)
    with torch.inference_mode():
        fused = fused_decode(model, slots, hf, max_length=32)
        assert fused is not None
        for step in range(20):
            tokens = torch.arange(5) * 40 + step
            at = torch.full((5,), step)
            expected = hf(tokens, at, 32)
            kept = slots.keys.clone(), slots.values.clone()
            found = fused(tokens, at, 32)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close((slots.keys, slots.values), kept, atol=1e-5, rtol=1e-5)


def test_the_written_out_step_follows_weight_updates():
    made, other = decoder(tiny_qwen3(3)), tiny_qwen3(4)
    model = made._hf._model
    Weights(model).copy(dict(other.named_parameters()))
    made.prefixes.clear()
    done = request([1, 2, 3])
    made.admit([done])
    run(made)
    assert made.is_fused
    assert_reference(other, done)


def test_the_written_out_step_is_not_taken_where_it_disagrees():
    """A model of a known name whose arithmetic changed upstream."""
    model = tiny_qwen3(3).requires_grad_(False)
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, given, out: out * 1.5)
    assert not decoder(model).is_fused


plans = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=10
)


@settings(max_examples=12, deadline=None)
@given(plan=plans, use_fused=st.booleans())
def test_any_order_of_joining_and_leaving_keeps_every_response_right(
    plan: list[tuple[int, int, int]], use_fused: bool
):
    model = FAMILIES["qwen3"](3)
    made = decoder(model, max_running=4, use_fused=use_fused)
    waiting = [
        (request([(7 * i + j) % VOCAB for j in range(size)], max_new), pause)
        for i, (size, max_new, pause) in enumerate(plan)
    ]
    done: list[Request] = []
    while waiting or made.num_running:
        while waiting and made.num_that_fit([waiting[0][0]]):
            joining, pause = waiting.pop(0)
            done += made.admit([joining])
            for _ in range(pause):
                done += made.step()
        done += made.step()
    assert len(done) == len(plan)
    for ended in done:
        assert len(ended.output) == ended.params.max_new_tokens
        assert_reference(model, ended)


def test_equal_prompts_are_read_once(monkeypatch: pytest.MonkeyPatch):
    model = tiny_qwen3(3)
    made = decoder(model)
    read: list[int] = []
    original = PrefillCache.prefilled

    def counted(cache: PrefillCache):
        kv = original(cache)
        read.append(kv.keys[0].shape[0])
        return kv

    monkeypatch.setattr(PrefillCache, "prefilled", counted)
    siblings = [request([1, 2, 3]) for _ in range(4)]
    made.admit([*siblings, request([4, 5, 6])])
    late = request([1, 2, 3])
    made.admit([late])
    run(made)
    assert read == [2]
    assert [r.cached_tokens for r in siblings] == [0, 2, 2, 2]
    assert late.cached_tokens == 2
    for done in (*siblings, late):
        assert_reference(model, done)


def test_retracted_requests_go_on_where_they_were():
    model = tiny_qwen3(3)
    straight, retracted = (request([1, 2, 3], 16, seed=5) for _ in range(2))
    made = decoder(model)
    made.admit([straight])
    run(made)
    made.admit([request([9], 30), retracted])
    for _ in range(4):
        made.step()
    made.evict([retracted])
    assert len(retracted.output) == 5
    made.step()
    made.admit([retracted])
    run(made)
    assert retracted.output == straight.output
    assert_reference(model, retracted)
    assert retracted.spans() == [{"version": "default", "start": 0, "end": 16}]


def test_weights_that_change_in_place_make_spans():
    old, new = tiny_qwen3(3), tiny_qwen3(4)
    served = tiny_qwen3(3)
    made = decoder(served)
    made.rename("v1")
    done = [request([1, 2, 3], 12), request([4, 5], 9)]
    made.admit(done)
    made.step()
    made.step()
    Weights(served).copy(dict(new.named_parameters()))
    made.prefixes.clear()
    made.rename("v2")
    run(made)
    for ended in done:
        assert ended.spans() == [
            {"version": "v1", "start": 0, "end": 3},
            {"version": "v2", "start": 3, "end": len(ended.output)},
        ]
        prompt = list(ended.prompt)
        first = reference_logprobs(old, prompt, ended.output[:3])
        second = reference_after_swap(old, new, prompt, ended.output, 3)
        torch.testing.assert_close(
            torch.tensor(ended.logprobs), torch.cat([first, second]), atol=1e-4, rtol=0
        )


@settings(max_examples=40, deadline=None)
@given(events=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=8))
def test_spans_tile_for_any_history_of_marks(events: list[tuple[int, int]]):
    made, at = request([1]), 0
    made.mark(0, "v0")
    history = ["v0"]
    for advance, version in events:
        at += advance
        history += [history[-1]] * (at - len(history) + 1)
        history[at] = f"v{version}"
        made.mark(at, f"v{version}")
    made.output = [0] * (at + 2)
    history += [history[-1]] * (at + 2 - len(history))
    spans = made.spans()
    found = [s["version"] for s in spans for _ in range(int(s["end"]) - int(s["start"]))]  # type: ignore[call-overload]
    assert found == history
    assert all(a["version"] != b["version"] for a, b in itertools.pairwise(spans))


def test_nothing_is_admitted_past_the_slots_or_the_pool():
    made = decoder(tiny_qwen3(3), max_running=3, max_total_tokens=96)
    first = request([1] * 10, 22)
    assert made.num_that_fit([first]) == 1
    made.admit([first])
    short = [request([1], 4) for _ in range(4)]
    assert made.num_that_fit(short) == 2
    assert made.num_that_fit([request([1] * 40, 20), *short]) == 0
    assert made.num_that_fit([]) == 0
    made.admit(short[:2])
    assert made.num_that_fit(short[2:]) == 0


def test_one_request_may_be_larger_than_its_share_of_the_pool():
    long = [request([1] * 40, 20) for _ in range(2)]
    assert decoder(tiny_qwen3(3), max_total_tokens=16).num_that_fit(long) == 1


def test_layers_that_are_not_full_attention_are_refused(tmp_path: Any):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.contracts.tiny_models import SHAPE

    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnavailableFeature, match="sliding_attention"):
        load_model(tmp_path, "auto")
