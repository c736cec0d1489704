"""Frames between the pool and its workers: four bytes of length, then JSON. Never pickle.

A verifier runs code and reads text that nobody vouches for; what comes back from its process is
data to be checked, and a frame longer than agreed is refused before it is read.
"""

from __future__ import annotations

import json
import struct
from typing import Any, cast

HEADER = struct.Struct(">I")
MAX_REQUEST_BYTES = 256 << 20
MAX_REPLY_BYTES = 1 << 20


def pack(message: dict[str, object]) -> bytes:
    """One message as a frame."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def body_length(header: bytes | bytearray, *, limit: int) -> int:
    """Length of the body that follows.

    Raises:
        ValueError: if it is longer than ``limit``.
    """
    (length,) = HEADER.unpack(header)
    if length > limit:
        raise ValueError(f"a frame of {length} bytes, at most {limit} were agreed")
    return length


def unpack(body: bytes) -> dict[str, Any]:
    """The message in a body.

    Raises:
        ValueError: if it is not a JSON object.
    """
    try:
        message = json.loads(body)
    except RecursionError as exc:
        raise ValueError("a message nested too deeply") from exc
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, this is {body[:80]!r}")
    return cast(dict[str, Any], message)
