"""Why a client gives up an idle connection before its server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from runtime.engines.keepalive import (
    CLIENT_KEEPALIVE_S,
    SERVER_KEEPALIVE_S,
    check_keepalive_order,
)
from runtime.errors import (
    ConfigError,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


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
