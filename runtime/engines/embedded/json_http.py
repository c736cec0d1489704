"""JSON in and out of the handlers, and the one place where they find the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
from aiohttp import web

from runtime.engines.embedded.engine import Engine
from runtime.engines.embedded.envelopes import invalid_body

EngineKey = web.AppKey("EngineKey", Engine)


def json_body(raw: bytes) -> object:
    """Read a JSON body; empty means ``{}``.

    Raises:
        Refused: 400 if it is not JSON.
    """
    if not raw:
        return {}
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_body("json_invalid", ("body", error.pos), "JSON decode error") from error


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def json_fields(http: web.Request) -> dict[str, Any]:
    """The fields of a JSON object body; Refused if it is another value."""
    body = json_body(await http.read())
    if not isinstance(body, dict):
        raise invalid_body("dict_type", ("body",), "Input should be a valid dictionary")
    return cast(dict[str, Any], body)


def text_field(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text that is not empty; Refused otherwise."""
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise invalid_body("string_type", ("body", name), "Input should be a valid string")
    return value


def integer_field(body: Mapping[str, Any], name: str) -> int:
    """An integer in [0, 2**31); Refused otherwise."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise invalid_body("int_type", ("body", name), "Input should be a valid integer")
    return value
