"""Whatever comes in, the server answers with a known status and goes on serving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.contracts.conftest import Models, RunningEngine, embedded
from tests.contracts.tiny_models import VOCAB

CONTROL = [
    "/abort_request", "/continue_generation", "/flush_cache", "/begin_weight_update",
    "/end_weight_update", "/update_weights_from_disk", "/update_weights_from_tensor",
    "/update_weights_from_distributed", "/destroy_weights_update_group", "/weights_checker",
    "/update_weight_version",
]  # fmt: skip
"""Those that cannot leave the engine paused or waiting for a peer."""

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
anything = st.recursive(
    scalars,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=6), inside),
    max_leaves=10,
)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


def spoilt(
    valid: dict[str, st.SearchStrategy[object]], *required: str
) -> st.SearchStrategy[object]:
    """Valid fields, of which up to two are replaced by anything."""
    whole = st.fixed_dictionaries(
        {k: valid[k] for k in required},
        optional={k: v for k, v in valid.items() if k not in required},
    )
    bad = st.dictionaries(st.sampled_from(sorted(valid)), anything, max_size=2)
    return st.tuples(whole, st.just({}) | bad).map(lambda parts: parts[0] | parts[1])


sampling = spoilt(
    {
        "max_new_tokens": st.integers(0, 6),
        "temperature": st.floats(0, 3),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(1, 2 * VOCAB) | st.just(-1),
        "min_p": st.floats(0, 1),
        "n": st.just(1) | st.integers(2, 4),
        "stop": st.text(min_size=1, max_size=2) | st.lists(st.just("a"), max_size=2),
        "stop_token_ids": st.lists(st.integers(-3, VOCAB + 3), max_size=6),
        "ignore_eos": st.booleans(),
        "sampling_seed": st.integers(-(2**63), 2**63 - 1),
        "regex": st.none(),
    },
    "max_new_tokens",
)
bodies = st.one_of(
    spoilt(
        {
            given: values,
            "sampling_params": sampling,
            "rid": st.text(max_size=3),
            "return_logprob": st.booleans(),
            "logprob_start_len": st.integers(-2, 9),
            "stream": st.booleans(),
            "extra_key": st.text(max_size=3),
            "unknown": anything,
        },
        given,
        "sampling_params",
    )
    for given, values in (
        ("input_ids", tokens | st.lists(tokens, min_size=1, max_size=3)),
        ("input_ids", st.lists(st.integers(-2, VOCAB + 2), max_size=4)),
        ("text", st.text(min_size=1, max_size=5) | st.lists(st.just("ab"), min_size=1, max_size=2)),
    )
)
fields = st.dictionaries(
    st.sampled_from(
        ["rid", "abort_all", "model_path", "weight_version", "flush_cache", "load_format", "names",
         "dtypes", "shapes", "group_name", "serialized_named_tensors", "new_version", "action"]
    ),
    anything,
    max_size=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[RunningEngine]:
    """The embedded one: SGLang's server is known to end on three kinds of request."""
    with embedded(models, max_running_requests=4) as made:
        yield made


bounded = settings(
    max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@bounded
@given(body=bodies)
@example(body={"input_ids": [[]], "sampling_params": {"max_new_tokens": 1}})
@example(body={"input_ids": [[1], 2], "sampling_params": {"max_new_tokens": 1}})
@example(body={"input_ids": [1], "sampling_params": {"max_new_tokens": 2**63}})
def test_generate_answers_and_lives(engine: RunningEngine, body: dict[str, object]):
    raw = as_json(body)
    status, content = asyncio.run(_send(engine, "/generate", raw))
    assert status in (200, 400), content
    if status == 400:
        assert "error" in orjson.loads(content) or orjson.loads(content)["object"] == "error"
    asyncio.run(_assert_alive(engine))


@bounded
@given(path=st.sampled_from(CONTROL), body=fields | anything)
def test_control_calls_answer_and_the_engine_lives(engine: RunningEngine, path: str, body: object):
    status, content = asyncio.run(_send(engine, path, as_json(body)))
    assert status in (200, 400), content
    asyncio.run(_assert_alive(engine))


@settings(bounded, max_examples=25)
@given(raw=st.binary(max_size=60), path=st.sampled_from(["/generate", *CONTROL]))
def test_bytes_that_are_no_json(engine: RunningEngine, raw: bytes, path: str):
    status, content = asyncio.run(_send(engine, path, raw))
    assert status in (200, 400), content
    asyncio.run(_assert_alive(engine))


def as_json(body: object) -> bytes:
    """JSON of any value; orjson writes no integers over 64 bits."""
    return json.dumps(body).encode()


async def _send(engine: RunningEngine, path: str, raw: bytes) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(engine.url + path, data=raw) as response,
    ):
        return response.status, await response.read()


async def _assert_alive(engine: RunningEngine) -> None:
    assert (await engine.get("/health_generate")).status == 200
