"""The one thread that an attempt's Ray belongs to, from its start to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runtime.errors import SessionLost


class RayThread:
    """Connects in a thread that then stays, and disconnects in it once ``end`` is called.

    Ray's connection belongs to the thread that made it, and the kernel takes that thread for the
    parent of the processes it started. One thread may wait in ``start`` while another calls
    ``end``.
    """

    def __init__(self, connect: Callable[[], object], disconnect: Callable[[], object]) -> None:
        """Prepare; nothing is called yet.

        Args:
            connect: brings Ray up; may look at ``is_over`` and ``raise_if_over`` where it waits.
            disconnect: follows it, also where it failed.
        """
        self._connect = connect
        self._disconnect = disconnect
        self.is_over = threading.Event()
        """``end`` was called."""
        self._is_settled = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="ray", daemon=True)

    def start(self, limit_s: float) -> None:
        """Wait until it is connected, or ``end`` is called.

        Raises:
            SessionLost: if ``end`` was called before it was connected.
            TimeoutError: after ``limit_s``; the thread goes on trying until ``end``.
            Exception: what connecting raised.
        """
        self._thread.start()
        if not self._is_settled.wait(limit_s):
            raise TimeoutError
        self.raise_if_over()
        if self._error is not None:
            raise self._error

    def raise_if_over(self) -> None:
        """Go on, or leave where nobody wants the connection any more.

        Raises:
            SessionLost: once ``end`` was called.
        """
        if self.is_over.is_set():
            raise SessionLost("the start of Ray was given up")

    def end(self, limit_s: float) -> None:
        """Disconnect, and end a wait in ``start``. Idempotent.

        Connecting itself cannot be interrupted: a thread that is still in it after ``limit_s`` is
        left to end by itself, or with this process.
        """
        self.is_over.set()
        self._is_settled.set()
        # One that has not begun yet will find that it is over.
        if self._thread.is_alive():
            self._thread.join(limit_s)

    def _live(self) -> None:
        if self.is_over.is_set():
            return
        try:
            self._connect()
        except BaseException as error:
            self._error = error
            self._is_settled.set()
        else:
            self._is_settled.set()
            self.is_over.wait()
        self._disconnect()
