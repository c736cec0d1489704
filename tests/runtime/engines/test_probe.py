"""What is believed of an engine: only what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from runtime.engines.client import HttpEngineClient
from runtime.engines.keepalive import CLIENT_KEEPALIVE_S
from runtime.errors import ConfigError, ContractViolation

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class OldServer:
    """Keeps of SGLang 0.5.17: no /milepost, no update sessions, one version for a whole response.

    ``versions`` says how a response tells its weights: not at all, the newest one for all tokens,
    or each token's own. A response ends once it was paused and continued; ``is_quick`` ends it
    before anybody can. ``facts`` gives it a /milepost.
    """

    def __init__(
        self,
        versions: str = "none",
        *,
        is_quick: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self._facts = facts
        self._versions = versions
        self._is_quick = is_quick
        self.version = "default"
        self.renames: list[str] = []
        self._running = 0
        self._continued = asyncio.Event()
        self.salts: list[str] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        num_tokens, salt = body["sampling_params"]["max_new_tokens"], body.get("extra_key")
        before = self.version
        if num_tokens > 1 and not self._is_quick:
            self._running += 1
            await self._continued.wait()
            self._running -= 1
        meta: dict[str, Any] = {"cached_tokens": 7 if salt in self.salts else 0}
        self.salts.append(salt)
        if self._versions == "newest":
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": num_tokens}]
        elif self._versions == "each":
            cut = [(before, 0, 3), (self.version, 3, num_tokens)]
            if before == self.version:
                cut = [(before, 0, num_tokens)]
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in cut]
        elif self._versions == "gap":
            cut = [(before, 0, 3), (self.version, 4, num_tokens)]
            meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in cut]
        return web.json_response({"output_ids": [0] * num_tokens, "meta_info": meta})

    async def rename(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        self.renames.append(self.version)
        return web.json_response({"success": True})

    async def pause(self, request: web.Request) -> web.Response:
        self._continued.clear()
        return web.json_response({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self._continued.set()
        return web.json_response({"status": "ok"})

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._running}]})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"version": "0.5.17", "max_req_input_len": 2042, "max_running_requests": 8}
        )

    async def milepost(self, request: web.Request) -> web.Response:
        return web.json_response(self._facts)

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[str]:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/update_weight_version", self.rename),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.get("/v1/loads", self.loads),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
            ]
        )
        if self._facts is not None:
            app.router.add_get("/milepost", self.milepost)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("server", "proves"),
    [
        (OldServer, False),
        (lambda: OldServer("newest"), False),
        (lambda: OldServer("gap"), False),
        (lambda: OldServer("each"), True),
        # Nothing was shown: a pause that came too late proves nothing.
        (lambda: OldServer("each", is_quick=True), False),
    ],
    ids=["no spans", "newest for all", "gap", "each its own", "too quick"],
)
async def test_spans_are_believed_when_a_swap_showed_them(server: Any, proves: bool):
    old = server()
    async with old.serve() as url, HttpEngineClient(url, vocab_size=100) as client:
        info = await client.info()
    assert info.native_spans is proves
    assert old.version == "default"  # the probe leaves no trace
    assert (info.takes_salt, info.update_bracket, info.forgets_prefixes) == (True, False, False)
    assert (info.version, info.context_length) == ("0.5.17", 2048)


async def test_an_engine_whose_vocabulary_nobody_knows_is_refused():
    async with OldServer().serve() as url, HttpEngineClient(url) as client:
        with pytest.raises(ContractViolation, match="vocabulary"):
            await client.info()


@pytest.mark.parametrize("server_s", [1, CLIENT_KEEPALIVE_S, 2 * CLIENT_KEEPALIVE_S - 1])
async def test_an_engine_that_lets_go_of_connections_before_we_do_is_refused(server_s: float):
    facts = {"contract": 1, "vocab_size": 100, "keepalive_s": server_s}
    async with OldServer(facts=facts).serve() as url, HttpEngineClient(url) as client:
        with pytest.raises(ConfigError, match="keep-alive"):
            await client.info()


async def test_one_that_keeps_them_longer_is_not():
    facts = {"contract": 1, "vocab_size": 100, "keepalive_s": 2 * CLIENT_KEEPALIVE_S}
    async with OldServer(facts=facts).serve() as url, HttpEngineClient(url) as client:
        assert (await client.info()).vocab_size == 100
