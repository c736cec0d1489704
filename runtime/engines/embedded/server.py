"""The embedded engine as a process: ``python -m runtime.engines.embedded.server``.

With ``--owned`` it reads its settings as one line of JSON from stdin (so no secret stands in a
command line), writes one line of JSON to stdout when it answers, and ends when stdin does: that
pipe is held by its owner, so it cannot outlive it, however the owner ends. Without, it takes a
model folder and a port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import threading
from typing import TextIO

import orjson
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import SecretStr

from runtime.engines.embedded.control import routes
from runtime.engines.embedded.engine import Engine
from runtime.engines.embedded.envelopes import Refused
from runtime.engines.embedded.generation import EngineKey, generate, json_response
from runtime.engines.embedded.scheduler import EngineStopped
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.keepalive import check_keepalive_order

_log = structlog.get_logger("engine")


class Server:
    """An engine and its socket; ``async with`` starts and stops both."""

    def __init__(self, settings: EngineSettings) -> None:
        check_keepalive_order(server_s=settings.keepalive_s)
        self._settings = settings
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Server:
        settings = self._settings
        self.engine = Engine(settings)
        app = web.Application(
            middlewares=[_answers(settings.api_key)], client_max_size=settings.max_body_bytes
        )
        app[EngineKey] = self.engine
        app.add_routes([web.post("/generate", generate), web.put("/generate", generate), *routes()])
        # handler_cancellation: a client that is gone stops its requests, as upstream.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=settings.keepalive_s,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.engine.stop()
        if self._runner is not None:
            await self._runner.cleanup()


def _answers(api_key: SecretStr | None) -> Middleware:
    """Turn refusals, unknown paths and missing tokens into upstream's answers."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key is not None and not request.path.startswith("/health"):
            given = request.headers.get("Authorization", "")
            expected = f"Bearer {api_key.get_secret_value()}"
            if not secrets.compare_digest(given.encode(), expected.encode()):
                return json_response({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except Refused as refused:
            return json_response(refused.body, refused.status)
        except web.HTTPException as error:
            return json_response({"detail": error.reason}, error.status)
        except EngineStopped:
            # A dead engine drops its connections, as upstream's does: clients know that as
            # "transport", where any answer would be a new kind of 503.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=503)
        except Exception:
            # As upstream: the text says nothing, the log says it all.
            _log.exception("engine.request_failed", path=request.path)
            return web.Response(text="Internal Server Error", status=500)

    return middleware


async def serve(settings: EngineSettings, ready: TextIO, *, owned: bool) -> int:
    """Serve until SIGTERM or SIGINT or, when owned, until stdin ends.

    Returns:
        The exit code: 0, or 1 when the decoder has died.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if owned:
        threading.Thread(target=_watch_owner, args=(loop, stop), name="owner", daemon=True).start()
    async with Server(settings) as server:
        # A server whose decoder has died answers nothing but 503: better gone than half alive.
        server.engine.on_death = stop.set
        ready.write(orjson.dumps({"url": server.url, "pid": os.getpid()}).decode() + "\n")
        ready.flush()
        _log.info("engine.started", url=server.url, model=settings.model_path)
        await stop.wait()
        has_died = not server.engine.scheduler.is_alive
    _log.info("engine.stopped", url=server.url, decoder_died=has_died)
    return int(has_died)


def _watch_owner(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Until stdin ends; then a clean stop, and after five seconds any stop."""
    # os.read: a daemon thread inside sys.stdin's lock would abort the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    threading.Timer(5.0, os._exit, args=(1,)).start()
    loop.call_soon_threadsafe(stop.set)


def _settings_line() -> bytes:
    """The first line of stdin, read without buffering."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


def main() -> None:
    """Run one server."""
    parser = argparse.ArgumentParser(description="Embedded engine")
    parser.add_argument("--owned", action="store_true", help="settings from stdin, life by stdin")
    parser.add_argument("--model-path", help="folder of an HF causal LM")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-running-requests", type=int, default=256)
    args = parser.parse_args()
    if args.owned:
        settings = EngineSettings.model_validate_json(_settings_line())
    elif args.model_path:
        settings = EngineSettings(
            model_path=args.model_path,
            port=args.port,
            max_running_requests=args.max_running_requests,
        )
    else:
        parser.error("--model-path or --owned is needed")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        import uvloop

        run = uvloop.run
    except ImportError:  # optional: the standard loop does the same, a little slower
        run = asyncio.run
    code = run(serve(settings, sys.stdout, owned=args.owned))
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; taking torch down module by module would cost the owner another second.
    os._exit(code)


if __name__ == "__main__":
    main()
