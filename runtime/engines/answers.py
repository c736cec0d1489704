"""What an engine's answer means: a pure function from status, body and finish reason to an error.

The pinned engines' contract decides, not the status alone: an abort may come as HTTP 200, and 503
also means broken configuration. What is not recognised is fatal. docs/engine-contract.md holds the
bodies this was written from; the tests run every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from runtime.errors import (
    ContractViolation,
    EngineRefused,
    GenerationTimeout,
    OverloadError,
    RunError,
    ServingError,
    TransportError,
    UnavailableError,
)

Call = Literal["generate", "control"]

MAX_TEXT = 500
"""Characters of a foreign body that are kept in an error."""

_BY_MESSAGE: dict[str, type[RunError]] = {
    "The request queue is full.": OverloadError,
    "The request is aborted by a higher priority request.": OverloadError,
    "Request waiting timeout reached.": GenerationTimeout,
    "Request running timeout reached.": GenerationTimeout,
}
"""503s of the engine itself, by their whole message."""

_BY_CODE: dict[str, type[RunError]] = {
    "no_healthy_workers": UnavailableError,
    "no_available_workers": UnavailableError,
    "queue_full": OverloadError,
    "deadline_waiting": GenerationTimeout,
    "deadline_running": GenerationTimeout,
    "worker_connection_lost": TransportError,
}
"""503s of a router, by the class in their body."""

_ROUTER_TEXTS: dict[str, type[RunError]] = {
    "No available workers (all circuits open or unhealthy)": UnavailableError,
}
"""503s of sglang-router, by their plain text."""

_ROUTER_CODES: dict[tuple[int, str], type[RunError]] = {
    # sglang-router 0.3.2 sends a worker's own answer on as it is; these are about its connection.
    (500, "call_upstream_connection_failed"): TransportError,
    (500, "call_upstream_request_error"): TransportError,
    (500, "call_upstream_body_error"): TransportError,
    (500, "read_response_body_failed"): TransportError,
    (504, "call_upstream_timeout"): GenerationTimeout,
}
"""Other answers of sglang-router, by status and the code in their body."""

_ORDINARY_ABORTS = ("Aborted", "Abort in waiting queue")
"""Aborts that we, or a pause, asked for: partial output, no error."""

_PASSING: dict[int, type[ServingError]] = {
    429: OverloadError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
"""What a gateway says, in words of its own, while the server behind it is away."""


def classify(
    status: int,
    body: object,
    finish_reason: Mapping[str, object] | None = None,
    *,
    call: Call = "generate",
) -> RunError | None:
    """Read one answer.

    Args:
        status: HTTP status.
        body: parsed JSON, or the text where the body is none.
        finish_reason: of one sample, for answers of ``/generate`` that carry samples.
        call: control calls are refused with EngineRefused, also by 200 and ``success: false``.

    Returns:
        The error this answer stands for, or None where it is a success. Errors of class
        TransportError, OverloadError, UnavailableError and GenerationTimeout may be retried by the
        group; everything else is fatal for the call, a bare 503 among them.
    """
    if call == "control":
        return _control(status, body)
    if status == 200:
        return None if finish_reason is None else _finish(finish_reason)
    detail = {"status": status, "body": text_of(body)}
    if status == 429:
        return OverloadError(f"engine answered 429: {text_of(body)}", **detail)
    known = _known_503(body) if status == 503 else _ROUTER_CODES.get((status, _code(body)))
    if known is not None:
        return known(f"engine answered {status}: {text_of(body)}", **detail)
    return ContractViolation(
        f"engine answered {status}, which no retry can mend: {text_of(body)}", **detail
    )


def classify_foreign(status: int, body: object, *, call: Call = "generate") -> RunError | None:
    """Read one answer of a server that may be somebody else's, behind a gateway nobody told us of.

    As ``classify``, but 429, 502, 503 and 504 pass whatever their body says: for calls that change
    nothing there, so that asking again costs a try and no more.
    """
    failure = classify(status, body, call=call)
    if failure is None or isinstance(failure, ServingError) or status not in _PASSING:
        return failure
    text = text_of(body)
    return _PASSING[status](f"server answered {status}: {text}", status=status, body=text)


def finish_foreign(reason: Mapping[str, object]) -> RunError | None:
    """Read the finish reason of a call that asked for one token and aborted nothing.

    Any abort without a status, or with one that passes, is the server's own: UnavailableError.
    """
    failure = classify(200, None, reason)
    if reason.get("type") != "abort" or isinstance(failure, ServingError):
        return failure
    if reason.get("status_code") not in (None, *_PASSING):
        return failure
    return UnavailableError(
        f"the server aborted a request that nobody aborted: {dict(reason)}",
        finish_reason=dict(reason),
    )


def message_of(body: object) -> str | None:
    """The message in any of the error envelopes; None where there is none."""
    if not isinstance(body, dict):
        return None
    fields = cast(dict[str, object], body)
    error = fields.get("error")
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        error = cast(dict[str, object], error).get("message")
        return error if isinstance(error, str) else None
    message = fields.get("error_message") or fields.get("message")
    return message if isinstance(message, str) else None


def text_of(body: object) -> str:
    """A short text for logs and messages."""
    return (message_of(body) or str(body))[:MAX_TEXT]


def _known_503(body: object) -> type[RunError] | None:
    if isinstance(body, str):
        return _ROUTER_TEXTS.get(body.strip())
    message = message_of(body)
    if message in _BY_MESSAGE:
        return _BY_MESSAGE[message]
    return _BY_CODE.get(_code(body))


def _code(body: object) -> str:
    """The class that a router gives its error; empty where there is none."""
    if not isinstance(body, dict):
        return ""
    error = cast(dict[str, object], body).get("error")
    holder = cast(dict[str, object], error if isinstance(error, dict) else body)
    code = holder.get("code", holder.get("type"))
    return code if isinstance(code, str) else ""


def _finish(reason: Mapping[str, object]) -> RunError | None:
    kind = reason.get("type")
    if kind in ("stop", "length"):
        return None
    message, status = reason.get("message"), reason.get("status_code")
    detail = {"finish_reason": dict(reason)}
    if kind == "abort":
        if status is None and message in _ORDINARY_ABORTS:
            return None
        if status in (503, 429) and isinstance(message, str):
            known = OverloadError if status == 429 else _BY_MESSAGE.get(message)
            if known is not None:
                return known(f"engine aborted the request: {message}", **detail)
    return ContractViolation(f"a response ended in no known way: {dict(reason)}", **detail)


def _control(status: int, body: object) -> RunError | None:
    fields = cast(dict[str, object], body) if isinstance(body, dict) else {}
    if status == 200 and fields.get("success") is not False:
        return None
    text = text_of(cast(object, body))
    return EngineRefused(f"engine answered {status}: {text}", status=status, body=text)
