"""Tasks that may not end silently."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio

from runtime.errors import SessionError


async def watched(body: Callable[[], Awaitable[None]], fail: Callable[[Exception], None]) -> None:
    """Run ``body``; tell ``fail`` of its error, and of a cancellation that nobody asked for.

    A task group takes a CancelledError that leaked out of a library for its own and ends the task
    without a word; here it becomes a SessionError.
    """
    try:
        await body()
    except Exception as error:
        fail(error)
    except anyio.get_cancelled_exc_class():
        if not is_cancelled():
            fail(SessionError("a task of the producer was cancelled by nobody"))
        raise


def is_cancelled() -> bool:
    """The present task is being cancelled by a scope around it, and not by a stray exception."""
    return anyio.current_effective_deadline() == -math.inf
