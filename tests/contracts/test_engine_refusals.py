"""Requests over HTTP that no engine takes, and in which words, the same for all engines."""

from __future__ import annotations

import pytest

from tests.contracts.conftest import RunningEngine, only_on
from tests.contracts.generating import LONG, generate
from tests.contracts.tiny_models import CONTEXT, VOCAB

pytestmark = pytest.mark.anyio


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
