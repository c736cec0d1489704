"""One middleware around every handler: the API key, and errors as upstream answers them."""

from __future__ import annotations

import secrets

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import SecretStr

from runtime.engines.embedded.envelopes import Refused
from runtime.engines.embedded.json_http import json_response
from runtime.engines.embedded.scheduler import EngineStopped
from runtime.telemetry.events import Event

_log = structlog.get_logger("engine")


def upstream_answers(api_key: SecretStr | None) -> Middleware:
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
        except ConnectionResetError:
            raise  # the client has left in the middle: nobody hears an answer, and nothing failed
        except Exception:
            # As upstream: the text says nothing, the log says it all.
            _log.exception(Event.ENGINE_REQUEST_FAILED, path=request.path)
            return web.Response(text="Internal Server Error", status=500)

    return middleware
