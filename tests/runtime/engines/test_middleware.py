"""A client that leaves in the middle of its answer is nobody's failure; a broken handler is."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import structlog
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from runtime.engines.embedded.middleware import upstream_answers
from runtime.telemetry.events import Event

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("breaks", [False, True])
async def test_only_a_handler_that_breaks_is_logged(breaks: bool) -> None:
    ended = anyio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if breaks:
                raise ZeroDivisionError
            response = web.StreamResponse()
            await response.prepare(request)
            while request.transport is not None and not request.transport.is_closing():
                await anyio.lowlevel.checkpoint()
            await response.write(b"to nobody")
            return response
        finally:
            ended.set()

    app = web.Application(middlewares=[upstream_answers(None)])
    app.router.add_get("/", handle)
    with structlog.testing.capture_logs() as logs:
        async with TestServer(app) as server, ClientSession() as client:
            async with client.get(server.make_url("/")) as response:
                assert response.status == (500 if breaks else 200)
            with anyio.fail_after(30):
                await ended.wait()
    failures = [row for row in logs if row["event"] == Event.ENGINE_REQUEST_FAILED]
    assert len(failures) == int(breaks)
