"""What happens when the Prefect server does not take what a flow shows.

It costs nothing but the showing, and that only for as long as the server is away: what people look
for afterwards (the phase, the tables, the summary) is kept and shown once it answers again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import httpx
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

SERVER_TROUBLE = (PrefectException, httpx.HTTPError, OSError)
"""All that a call of the server raises when it is away, busy or refuses: none of it concerns the
run. Prefect lets the errors of its HTTP client through as they are."""

MAX_WAITING = 64
"""Things to be shown later, of all flow runs of this process; beyond it the oldest is given up."""
_RETRY_S = 2.0

Show = Callable[[], object]

_waiting: dict[tuple[str, str], Show] = {}


@contextmanager
def only_display(what: str) -> Generator[None]:
    """Log trouble with the server and go on: it costs what would have been shown, nothing else."""
    try:
        yield
    except SERVER_TROUBLE as error:
        _say(what, error)


def show(what: str, action: Show) -> None:
    """Show something now, or as soon as the server answers again; the newest ``what`` counts.

    Args:
        what: its name, one per thing that is shown: a later one under the same name replaces it.
        action: the call; may be made again, also from another task of the flow run.
    """
    key = (str(flow_run.id), what)
    try:
        action()
    except SERVER_TROUBLE as error:
        _say(what, error)
        _waiting.pop(key, None)
        _waiting[key] = action
        while len(_waiting) > MAX_WAITING:
            del _waiting[next(iter(_waiting))]
    else:
        _waiting.pop(key, None)


def show_again() -> bool:
    """Try what is waiting, oldest first, until one fails; True when nothing of this run waits."""
    here = str(flow_run.id)
    for key, action in [item for item in _waiting.items() if item[0][0] == here]:
        try:
            action()
        except SERVER_TROUBLE:
            return False
        _waiting.pop(key, None)
    return True


def show_rest(deadline_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """At the end of a flow: wait until everything is shown, at most ``deadline_s``."""
    until = time.monotonic() + deadline_s
    while not show_again() and time.monotonic() < until:
        sleep(_RETRY_S)


def _say(what: str, error: Exception) -> None:
    get_run_logger().warning("%s could not be shown: %s", what, error)
