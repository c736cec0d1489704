"""The client against sockets that misbehave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime.engines.client import ClientLimits, HttpEngineClient
from runtime.engines.protocol import EngineClient
from runtime.errors import (
    ContractViolation,
    GenerationTimeout,
    TransportError,
    WaitTimeout,
)
from tests.runtime.engines.raw_servers import client, http, raw_server, request

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


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
