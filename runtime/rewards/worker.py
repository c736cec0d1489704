"""Main module of a verifier process: ``python -m runtime.rewards.worker``.

First frame in: which verifiers, where to look for them, how much memory. Then one frame in for each
group; frames out as verdicts come. Frames leave by a descriptor that no verifier knows: whatever it
prints goes into a short tail that is sent along with an error.

It ends when its parent ends, in three ways, since each has a hole: end of file on stdin (seen by
a thread, so not while C code holds the interpreter lock), the kernel's parent-death signal (Linux),
and the pool's SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from runtime.rewards.verifiers import Verifier, VerifierSpec, load_verifier
from runtime.rewards.wire import HEADER, MAX_REQUEST_BYTES, body_length, pack, unpack

_TAIL_CHARS = 2000
_HELD_S = 0.05
"""Longest that verdicts wait for others while responses are judged: far below any time limit."""
_PR_SET_PDEATHSIG = 1


class Tail(io.TextIOBase):
    """Keeps the last characters written to it."""

    def __init__(self) -> None:
        self._text = ""

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str, /) -> int:
        """Keep the end of everything written so far."""
        self._text = (self._text + text)[-_TAIL_CHARS:]
        return len(text)

    def take(self) -> str:
        """What was kept; it is forgotten then."""
        text, self._text = self._text, ""
        return text


def main() -> int:
    """Serve groups until stdin ends."""
    requests, replies = _claim_channel()
    _die_with_parent(requests)
    tail = Tail()
    sys.stdout = sys.stderr = cast(Any, tail)
    hello = _read(requests)
    if hello is None:
        return 0
    try:
        verifiers = _prepare(hello)
    except Exception as exc:
        _write(replies, {"refused": f"{type(exc).__name__}: {exc}", "trace": _trace(tail)})
        return 1
    _write(replies, {"ready": os.getpid()})
    while (request := _read(requests)) is not None:
        _serve(request, verifiers, replies, tail)
    return 0


def _claim_channel() -> tuple[IO[bytes], IO[bytes]]:
    """Take stdin and stdout away from everybody else in this process."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb", buffering=0)


def _die_with_parent(requests: IO[bytes]) -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
    threading.Thread(target=_watch, args=(requests.fileno(),), daemon=True).start()


def _watch(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # hang-up and error only: data is the main thread's
    poller.poll()
    os._exit(0)


def _prepare(hello: Mapping[str, Any]) -> dict[str, Verifier]:
    # Out of memory, the kernel should end a verifier and not a trainer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (limit := hello["memory_limit_bytes"]) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.path[:0] = hello["search_paths"]
    return {item["name"]: load_verifier(VerifierSpec(**item)) for item in hello["verifiers"]}


def _serve(
    request: Mapping[str, Any],
    verifiers: Mapping[str, Verifier],
    replies: IO[bytes],
    tail: Tail,
    *,
    now: Callable[[], float] = time.monotonic,
) -> None:
    verifier, number = verifiers[request["verifier"]], request["request"]
    travel_together = verifier.is_instant and not request["apart"]
    tail.take()
    ready: list[object] = []
    sent_at = now()
    try:
        verdicts = verifier.judge(request["responses"], request["answer"], request["metadata"])
        if verifier.batched:
            _reply(replies, number, {"verdicts": [_plain(verdict) for verdict in verdicts]})
            return
        for verdict in map(_plain, verdicts):
            if not (isinstance(verdict, float) and math.isfinite(verdict)):
                _reply_ready(replies, number, ready)
                _reply(replies, number, {"verdicts": [verdict]})
                return  # the pool refuses it, and this process with it
            ready.append(verdict)
            if not travel_together or now() - sent_at > _HELD_S:
                _reply_ready(replies, number, ready)
                sent_at = now()
        _reply_ready(replies, number, ready)
    except Exception as exc:
        # The error is the next one's: those before it have their verdicts.
        _reply_ready(replies, number, ready)
        error = f"{type(exc).__name__}: {exc}"[:_TAIL_CHARS]
        _reply(replies, number, {"error": error, "trace": _trace(tail)})


def _reply(replies: IO[bytes], number: int, message: dict[str, object]) -> None:
    _write(replies, {"request": number, **message})


def _reply_ready(replies: IO[bytes], number: int, ready: list[object]) -> None:
    if ready:
        _reply(replies, number, {"verdicts": ready})
        ready.clear()


def _plain(verdict: object) -> object:
    """A verdict as JSON can hold it; what is no number travels as a text and is refused there."""
    if not isinstance(verdict, str | bytes) and hasattr(verdict, "__float__"):
        return float(cast(Any, verdict))
    return f"{type(verdict).__name__} {verdict!r:.200}"


def _trace(tail: Tail) -> str:
    trace = traceback.format_exc()[-_TAIL_CHARS:]
    printed = tail.take()
    return trace + (f"\nprinted: {printed}" if printed else "")


def _read(requests: IO[bytes]) -> dict[str, Any] | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return unpack(requests.read(body_length(header, limit=MAX_REQUEST_BYTES)))


def _write(replies: IO[bytes], message: dict[str, object]) -> None:
    view = memoryview(pack(message))
    while view:
        view = view[replies.write(view) :]


if __name__ == "__main__":
    sys.exit(main())
