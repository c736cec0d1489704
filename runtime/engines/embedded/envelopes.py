"""The bodies of SGLang's error answers: three envelopes, as recorded in docs/engine-contract.md."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """An answer other than 200: its status and its JSON body."""

    def __init__(self, status: int, body: Mapping[str, object]) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body


def bad_request(message: str) -> Refused:
    """400 ``{"error": {"message"}}``: what ``/generate`` says about its values."""
    return Refused(400, {"error": {"message": message}})


def unknown_field(name: str, known: tuple[str, ...]) -> Refused:
    """400 ``{"error": "text"}``: what the sampling parameters' parser says."""
    names = ", ".join(f"`{k}`" for k in known)
    return Refused(400, {"error": f"unknown field `{name}`, expected one of {names}"})


def invalid_body(kind: str, location: tuple[str | int, ...], message: str) -> Refused:
    """400 ``{"object": "error", ...}``: what the body's validator says. Names no server files."""
    detail = {"type": kind, "loc": location, "msg": message}
    return openai_error(400, f"1 validation error:\n  {detail}", "Bad Request")


def openai_error(status: int, message: str, kind: str) -> Refused:
    """``{"object": "error", "message", "type", "param", "code"}`` with ``code`` = status."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return Refused(status, body)


def unavailable_error(message: str) -> Refused:
    """503 in the same envelope, for a request the engine gave up on."""
    return openai_error(503, message, "503")


def failed_update(message: str) -> Refused:
    """400 ``{"success": false, "message"}``: what the weight endpoints say."""
    return Refused(400, {"success": False, "message": message})


def failed_adapter(message: str) -> Refused:
    """400 ``{"success": false, "error_message"}``: what the adapter endpoints say."""
    return Refused(400, {"success": False, "error_message": message, "loaded_adapters": None})
