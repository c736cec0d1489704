"""The keep-alive race: a client writes on a kept connection just as the server closes it."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.keepalive import CLIENT_KEEPALIVE_S, SERVER_KEEPALIVE_S
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.errors import TransportError
from tests.skipping_loop import SkippingLoop

pytestmark = pytest.mark.anyio

ANSWER = {
    "output_ids": [7],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "weight_version": "e1.u0",
        "weight_versions": [{"version": "e1.u0", "start": 0, "end": 1}],
        "output_token_logprobs": [[-0.5, 7, None]],
        "cached_tokens": 0,
    },
}
REQUEST = GenerateRequest(rid="r", input_ids=(1,), sampling=SamplingSettings(max_new_tokens=1))


@pytest.fixture
def anyio_backend():
    return "asyncio", {"loop_factory": SkippingLoop}


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch):
    """The client's pool looks at the process's clock; here it must be the loop's."""
    monkeypatch.setattr("aiohttp.connector.monotonic", lambda: asyncio.get_running_loop().time())


class Exchange:
    """The engines' HTTP server with some keep-alive, and our client, held up at each checkout."""

    def __init__(self, server_s):
        self.server_s = server_s
        self.stall_s = 0.0
        self.connections = set()

    async def __aenter__(self):
        app = web.Application()
        app.add_routes([web.post("/generate", self._answer)])
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=self.server_s)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.client = HttpEngineClient(f"http://{host}:{port}")
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(self._held_up)
        trace.freeze()
        self.client._http._open().trace_configs.append(trace)
        return self

    async def __aexit__(self, *exc):
        await self.client.close()
        await self._runner.cleanup()

    async def _answer(self, request):
        self.connections.add(request.transport.get_extra_info("peername"))
        return web.json_response(ANSWER)

    async def _held_up(self, *_):
        """Between checkout and write: a busy loop, a slow network, a stopped process."""
        await asyncio.sleep(self.stall_s)

    async def is_lost(self, *, idle_s, stall_s):
        """Whether a second request is lost, so long after the first and with such a stall."""
        self.stall_s = 0.0
        await self.client.generate(REQUEST, deadline_s=600)
        await asyncio.sleep(idle_s)
        self.stall_s = stall_s
        try:
            await self.client.generate(REQUEST, deadline_s=600)
        except TransportError:
            return True
        return False


async def test_equal_limits_lose_the_request_that_meets_the_close():
    async with Exchange(server_s=CLIENT_KEEPALIVE_S) as exchange:
        assert not await exchange.is_lost(idle_s=1.0, stall_s=0.2)
        assert await exchange.is_lost(idle_s=CLIENT_KEEPALIVE_S - 0.1, stall_s=0.2)
        assert not await exchange.is_lost(idle_s=CLIENT_KEEPALIVE_S + 1.0, stall_s=0.2)


@pytest.mark.parametrize("stall_s", [0.2, 10.0, 50.0])
async def test_our_limits_lose_none_however_long_the_connection_was_idle(stall_s):
    async with Exchange(server_s=SERVER_KEEPALIVE_S) as exchange:
        idles = [0.1, 1.0, 4.0, 4.9, 4.99, 5.0, 5.01, 6.0, 30.0, 59.9, 60.0, 60.1, 70.0]
        for idle_s in idles:
            assert not await exchange.is_lost(idle_s=idle_s, stall_s=stall_s), idle_s


async def test_connections_are_kept_while_requests_come_and_renewed_after_a_pause():
    async with Exchange(server_s=SERVER_KEEPALIVE_S) as exchange:
        for _ in range(5):
            await exchange.is_lost(idle_s=CLIENT_KEEPALIVE_S - 1.0, stall_s=0.0)
        assert len(exchange.connections) == 1
        await exchange.is_lost(idle_s=CLIENT_KEEPALIVE_S + 1.0, stall_s=0.0)
        assert len(exchange.connections) == 2


def test_the_embedded_server_keeps_them_as_long_unless_told_otherwise():
    assert EngineSettings(model_path="m").keepalive_s == SERVER_KEEPALIVE_S
