"""The client against sockets that misbehave, and its own refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch
from aiohttp import web
from safetensors.torch import save

from runtime.engines.client import ClientLimits, HttpEngineClient
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.keepalive import (
    CLIENT_KEEPALIVE_S,
    SERVER_KEEPALIVE_S,
    check_keepalive_order,
)
from runtime.engines.protocol import EngineClient, GenerateRequest, SamplingSettings
from runtime.engines.wire import aborted_early, generations
from runtime.errors import (
    ConfigError,
    ContractViolation,
    EngineRefused,
    GenerationTimeout,
    PartialWrite,
    TransportError,
    WaitTimeout,
)
from runtime.policy import PolicyId
from tests.contracts.conftest import ServerThread
from tests.contracts.tiny_models import VOCAB, save_model, tiny_qwen3

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def request(ids: tuple[int, ...] = (1, 2, 3), max_new: int = 4, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"rid": "r", **changes}
    sampling = SamplingSettings(max_new_tokens=max_new, ignore_eos=True)
    return GenerateRequest(input_ids=ids, sampling=sampling, **fields)


class RawServer:
    """Counts requests and answers each with raw bytes; empty bytes close the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.num_requests = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            size = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
            await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
            self.num_requests += 1
            answer = self.answers.pop(0) if self.answers else b""
            if not answer:
                break
            writer.write(answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncGenerator[RawServer]:
    made = RawServer(*answers)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    async with server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def http(status: int, body: object, kind: str = "application/json") -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def running(made: HttpEngineClient, count: int) -> None:
    """Until ``count`` requests run; the test's own timeout bounds it."""
    while True:
        if (await made.load()).running == count:
            return
        await asyncio.sleep(0)


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncGenerator[HttpEngineClient]:
    async with HttpEngineClient(url, **options) as made:
        yield made


def test_it_is_an_engine_client():
    made: EngineClient = HttpEngineClient("http://127.0.0.1:1/")
    assert made.url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n", b"garbage\r\n\r\n"]
)
async def test_a_dropped_connection_is_transport_and_asked_once(answer: bytes):
    """Generation may have run: whoever owns the group decides whether to ask again."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        counted.append(1)
        writer.write(answer)
        writer.close()

    counted: list[int] = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client(url) as made:
            with pytest.raises(TransportError):
                await made.generate(request(), deadline_s=10)
    assert counted == [1]


async def test_a_connection_lost_between_two_calls_is_not_repeated_either():
    """aiohttp repeats idempotent methods on a stale connection; generation must not be one."""
    async with (
        raw_server(http(200, {"weight_version": "e1.u1"})) as server,
        client(server.url) as made,
    ):
        assert await made.policy() == "e1.u1"
        with pytest.raises(TransportError):
            await made.generate(request(), deadline_s=10)
        assert server.num_requests == 2


async def test_a_client_that_was_closed_stays_closed():
    """The monitor closes the clients of engines that are gone; a group may still hold one."""
    async with raw_server(http(200, {}), http(200, {})) as server:
        for is_used in (True, False):
            made = HttpEngineClient(server.url)
            if is_used:
                await made.resume()
            await made.close()
            for call in (made.resume, made.info, lambda made=made: asking(made)):
                with pytest.raises(TransportError, match="closed"):
                    await call()
            await made.close()
        assert server.num_requests == 1


def asking(made: HttpEngineClient) -> Any:
    return made.generate(request(), deadline_s=60)


async def test_calls_that_run_or_wait_when_their_client_is_closed_are_transport():
    is_asked = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            is_asked.set()
            await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        made = HttpEngineClient(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", max_connections=1
        )
        runs = asyncio.ensure_future(asking(made))
        await is_asked.wait()
        waits = asyncio.ensure_future(asking(made))
        for _ in range(100):
            await asyncio.sleep(0)  # it comes to wait for the one connection
        await made.close()
        for each in (runs, waits):
            with pytest.raises(TransportError):
                await each


async def test_nobody_there_is_transport():
    async with raw_server() as server:
        url = server.url
    async with client(url) as made:
        with pytest.raises(TransportError):
            await made.generate(request(), deadline_s=10)
        assert not await made.is_alive(timeout_s=5)


async def test_a_deadline_ends_generation_as_a_timeout_and_hangs_up():
    hung_up = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while await reader.read(1000):
            pass
        hung_up.set()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server, client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as made:
        with pytest.raises(GenerationTimeout, match=r"0\.05 s"):
            await made.generate(request(), deadline_s=0.05)
        await asyncio.wait_for(hung_up.wait(), 10)


async def test_a_control_call_that_hangs_is_a_named_wait():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    limits = ClientLimits(control_s=0.05)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, client(url, limits=limits) as made:
        with pytest.raises(WaitTimeout, match="/pause_generation"):
            await made.pause("in_place")


@pytest.mark.parametrize(
    "answer",
    [
        http(503, b"", "text/plain"),
        http(200, b"{", "application/json"),
        http(200, b"ok", "text/plain"),
        http(200, [1, 2]),
    ],
)
async def test_answers_outside_the_contract_are_fatal(answer: bytes):
    async with raw_server(answer) as server, client(server.url) as made:
        with pytest.raises(ContractViolation):
            await made.generate(request(), deadline_s=10)


# What never leaves


async def test_requests_that_kill_upstreams_server_are_not_sent():
    async with raw_server() as server, client(server.url, vocab_size=VOCAB) as made:
        for ids in ((1, VOCAB), (-1,), (9_999_999,)):
            with pytest.raises(ContractViolation, match="outside the vocabulary"):
                await made.generate(request(ids), deadline_s=10)
        whole = save({"w": torch.zeros(3)})
        for payload in (b"", b"AAAA", b"\x80\x04.", whole[:-1], whole + b"x"):
            with pytest.raises(ContractViolation, match="safetensors"):
                await made.update_from_tensors(payload, policy=None, flush=False)
        assert server.num_requests == 0


async def test_a_folder_that_is_not_whole_is_not_sent(tmp_path: Path):
    """SGLang's whole server ends on a torn file. Cut here at each kind of place."""
    whole = save({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.uint8)})
    path, header_end = tmp_path / "model.safetensors", 8 + int.from_bytes(whole[:8], "little")
    answer = http(200, {"success": True, "message": "Succeeded to update model weights."})
    async with raw_server(answer) as server, client(server.url) as made:
        for cut in (0, 4, 8, header_end - 1, header_end, header_end + 4, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(PartialWrite, match=r"model\.safetensors"):
                await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        path.unlink()
        with pytest.raises(PartialWrite, match="no weights"):
            await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        assert server.num_requests == 0
        path.write_bytes(whole)
        await made.update_from_disk(str(tmp_path), PolicyId(1, 1), flush=False)
        assert server.num_requests == 1


async def test_a_flush_after_retraction_is_not_sent():
    async with raw_server(http(200, {"status": "ok"})) as server, client(server.url) as made:
        await made.pause("retract")
        with pytest.raises(EngineRefused, match="retract"):
            await made.update_from_disk("/x", PolicyId(1, 1), flush=True)
        with pytest.raises(EngineRefused):
            await made.update_from_tensors(
                save({"w": torch.zeros(3)}), policy=PolicyId(1, 1), flush=True
            )
        with pytest.raises(EngineRefused):
            await made.update_from_distributed([], group="g", policy=None, flush=True)
        assert server.num_requests == 1


# With the real embedded server


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


# Keep-alive


@pytest.mark.parametrize(("server_s", "client_s"), [(5.0, 5.0), (4.0, 5.0), (9.9, 5.0), (60, 0)])
def test_keepalive_values_that_race_are_refused(server_s: float, client_s: float):
    with pytest.raises(ConfigError):
        check_keepalive_order(server_s=server_s, client_s=client_s)


def test_our_own_keepalive_values_are_in_order():
    check_keepalive_order()
    assert (SERVER_KEEPALIVE_S, CLIENT_KEEPALIVE_S) == (60.0, 5.0)


class JumpingLoop:
    """Moves the running loop's clock, so that idle times pass without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self.offset = 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self.offset)
        # The client's pool has a clock of its own.
        monkeypatch.setattr("aiohttp.connector.monotonic", lambda: real() + self.offset)

    def jump(self, seconds: float) -> None:
        self.offset += seconds


@asynccontextmanager
async def plain_server(keepalive_s: float) -> AsyncGenerator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "e1.u1"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, keepalive_timeout=keepalive_s)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def losses(monkeypatch: pytest.MonkeyPatch, server_s: float, client_s: float) -> int:
    """Calls lost when the next one comes around the idle limits.

    The race is provoked: between taking a kept connection out of the pool and writing to it, a
    moment passes in which the server may close it.
    """
    moment_s = 0.01
    lost = 0
    with monkeypatch.context() as patch:
        clock = JumpingLoop(patch)

        async def between_checkout_and_write(*_: object) -> None:
            clock.jump(moment_s)
            for _turn in range(3):
                await asyncio.sleep(0)

        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(between_checkout_and_write)
        async with plain_server(server_s) as url:
            connector = aiohttp.TCPConnector(keepalive_timeout=client_s)
            async with aiohttp.ClientSession(connector=connector, trace_configs=[trace]) as session:
                for idle_s in (0.0, client_s - moment_s / 2, client_s + 1, server_s - moment_s / 2):
                    async with session.post(url) as first:
                        await first.read()
                    clock.jump(idle_s)
                    try:
                        async with session.post(url) as second:
                            await second.read()
                    except aiohttp.ClientError:
                        lost += 1
    return lost


async def test_equal_keepalives_lose_calls_and_ours_lose_none(monkeypatch: pytest.MonkeyPatch):
    assert await losses(monkeypatch, server_s=5.0, client_s=5.0) > 0
    assert await losses(monkeypatch, SERVER_KEEPALIVE_S, CLIENT_KEEPALIVE_S) == 0


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
