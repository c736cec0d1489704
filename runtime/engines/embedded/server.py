"""The embedded engine as a process: ``python -m runtime.engines.embedded.server``.

With ``--owned`` it reads its settings as one line of JSON from stdin (so no secret stands in a
command line), writes one line of JSON to stdout when it answers, and ends when stdin does: that
pipe is held by its owner, so it cannot outlive it, however the owner ends. The pipe is watched
before torch is imported. Without, it takes a model folder and a port.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import structlog
from aiohttp import web

from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.keepalive import check_keepalive_order
from runtime.telemetry.events import Event

if TYPE_CHECKING:
    from runtime.engines.embedded.engine import Engine

STOP_GRACE_S = 4.0
"""From the owner's end to an end by force; under the owner's own grace."""

_log = structlog.get_logger("engine")


class Server:
    """An engine and its socket; ``async with`` starts and stops both."""

    def __init__(self, settings: EngineSettings) -> None:
        check_keepalive_order(server_s=settings.keepalive_s)
        self._settings = settings
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.engine: Engine

    async def __aenter__(self) -> Server:
        # Here, not above: a child must watch its owner's pipe before torch is imported.
        from runtime.engines.embedded import control, updates
        from runtime.engines.embedded.engine import Engine
        from runtime.engines.embedded.generation import generate
        from runtime.engines.embedded.json_http import EngineKey
        from runtime.engines.embedded.middleware import upstream_answers

        settings = self._settings
        self.engine = Engine(settings)
        app = web.Application(
            middlewares=[upstream_answers(settings.api_key)],
            client_max_size=settings.max_body_bytes,
        )
        app[EngineKey] = self.engine
        app.add_routes([web.post("/generate", generate), web.put("/generate", generate)])
        app.add_routes([*control.routes(), *updates.routes()])
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


class Lifeline:
    """Ends this process when stdin ends: at once, or cleanly where a server has said how."""

    def __init__(self) -> None:
        self.stop: Callable[[], object] | None = None
        threading.Thread(target=self._watch, name="owner", daemon=True).start()

    def _watch(self) -> None:
        # os.read: a daemon thread inside sys.stdin's lock would abort the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        if self.stop is None:
            os._exit(1)
        threading.Timer(STOP_GRACE_S, os._exit, args=(1,)).start()
        self.stop()


async def serve(settings: EngineSettings, ready: TextIO, lifeline: Lifeline | None) -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline.

    Returns:
        The exit code: 0, or 1 when the decoder has died.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Server(settings) as server:
        # A server whose decoder has died answers nothing but 503: better gone than half alive.
        server.engine.on_death = stop.set
        if lifeline is not None:
            lifeline.stop = partial(loop.call_soon_threadsafe, stop.set)
        # As in the session: full collections would go through torch and the model, 0.14 s each.
        gc.collect()
        gc.freeze()
        ready.write(json.dumps({"url": server.url, "pid": os.getpid()}) + "\n")
        ready.flush()
        _log.info(Event.ENGINE_STARTED, url=server.url, model=settings.model_path)
        await stop.wait()
        has_died = not server.engine.scheduler.is_alive
    _log.info(Event.ENGINE_STOPPED, url=server.url, decoder_died=has_died)
    return int(has_died)


def main() -> None:
    """Run one server."""
    parser = argparse.ArgumentParser(prog="python -m runtime.engines.embedded.server")
    parser.add_argument("--owned", action="store_true", help="settings from stdin, life by stdin")
    parser.add_argument("--model-path", help="folder of an HF causal LM")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-running-requests", type=int, default=256)
    args = parser.parse_args()
    if args.owned:
        settings = EngineSettings.model_validate_json(_line())
    elif args.model_path:
        settings = EngineSettings(
            model_path=args.model_path,
            port=args.port,
            max_running_requests=args.max_running_requests,
        )
    else:
        parser.error("--model-path or --owned is needed")
    lifeline = Lifeline() if args.owned else None
    if not (Path(settings.model_path) / "config.json").is_file():
        sys.exit(f"no model in {settings.model_path!r}: there is no config.json")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        import uvloop

        run = uvloop.run
    except ImportError:  # optional: the standard loop does the same, a little slower
        run = asyncio.run
    code = run(serve(settings, sys.stdout, lifeline))
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; taking torch down module by module would cost the owner another second.
    os._exit(code)


def _line() -> bytes:
    """The first line of stdin, read without buffering."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line


if __name__ == "__main__":
    main()
