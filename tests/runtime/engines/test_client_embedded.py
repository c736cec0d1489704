"""The client with the real embedded server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from runtime.engines.embedded.settings import EngineSettings
from runtime.errors import (
    ContractViolation,
    EngineRefused,
    TransportError,
)
from runtime.policy import PolicyId
from tests.contracts.conftest import ServerThread
from tests.contracts.tiny_models import VOCAB, save_model, tiny_qwen3
from tests.runtime.engines.raw_servers import client, request, running

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model")))


@contextmanager
def embedded(folder: str, **settings: Any) -> Iterator[str]:
    with ServerThread(EngineSettings(model_path=folder, **settings)) as server:
        yield server.url


async def test_the_whole_protocol_against_the_embedded_engine(folder: str):
    with embedded(folder, api_key="s3cret", weight_version="e1.u0") as url:
        async with client(url) as stranger:
            with pytest.raises(EngineRefused, match="Unauthorized"):
                await stranger.policy()
            with pytest.raises(ContractViolation, match="Unauthorized"):
                await stranger.generate(request(), deadline_s=10)
            assert await stranger.is_alive(timeout_s=10)
        async with client(url, api_key="s3cret") as made:
            info = await made.info()
            assert (info.vocab_size, info.native_spans, info.takes_salt, info.update_bracket) == (
                VOCAB,
                True,
                True,
                True,
            )
            (sample,) = await made.generate(request(), deadline_s=30)
            assert (len(sample.token_ids), sample.prefill) == (4, PolicyId(1, 0))
            pair = await made.generate(request(n=2, rid="p", salt="e1.u0"), deadline_s=30)
            assert len(pair) == 2
            await made.pause("in_place")
            assert await made.is_alive(timeout_s=10)
            await made.set_policy(PolicyId(1, 1))
            await made.resume()
            assert await made.policy() == "e1.u1"
            # The probes too: three of one token, one that a change of version falls into.
            assert (await made.load()).generated_tokens == 4 + 8 + 3 + 48
            assert len(await made.checksums()) == 24
            await made.flush_cache()
            await made.destroy_update_group("nowhere")
            await made.begin_update()
            with pytest.raises(EngineRefused, match="already open"):
                await made.begin_update()
            await made.end_update()


async def test_abort_by_the_calls_id_ends_all_its_samples(folder: str):
    with embedded(folder, weight_version="e1.u0") as url:
        async with client(url) as made:
            call = asyncio.ensure_future(
                made.generate(request(max_new=4000, n=3, rid="call"), deadline_s=30)
            )
            await running(made, 3)
            await made.abort("call")
            samples = await call
    assert [s.finish for s in samples] == ["abort"] * 3
    assert all(0 < len(s.token_ids) < 4000 for s in samples)


async def test_a_dead_decoder_is_a_dropped_connection(folder: str, monkeypatch: pytest.MonkeyPatch):
    """As upstream dies; any answer would be a new kind of 503."""
    with ServerThread(EngineSettings(model_path=folder)) as server:

        def broken() -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(server.engine.decoder, "step", broken)
        async with client(server.url) as made:
            with pytest.raises(TransportError):
                await made.generate(request(), deadline_s=20)
            assert not await made.is_alive(timeout_s=20)


def test_any_address_but_a_loopback_one_needs_a_key(folder: str):
    with pytest.raises(ValueError, match="api_key"):
        EngineSettings(model_path=folder, host="0.0.0.0")
    assert EngineSettings(model_path=folder, host="0.0.0.0", api_key="k").host == "0.0.0.0"
