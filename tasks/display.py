"""What happens when the Prefect server does not take what a flow shows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import httpx
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

SERVER_TROUBLE = (PrefectException, httpx.HTTPError, OSError)
"""All that a call of the server raises when it is away, busy or refuses: none of it concerns the
run. Prefect lets the errors of its HTTP client through as they are."""


@contextmanager
def only_display(what: str) -> Generator[None]:
    """Log trouble with the server and go on: it costs what would have been shown, nothing else."""
    try:
        yield
    except SERVER_TROUBLE as error:
        get_run_logger().warning("%s could not be shown: %s", what, error)
