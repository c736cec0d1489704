"""A port that is looked up now and listened on later, by somebody else, with nobody in between.

A free port that is only looked up is anybody's until it is bound. So the port stays bound here, and
is not listened on: the system gives it to nobody who asks for any port, nor takes it for a
connection outwards, but whoever names it and says SO_REUSEADDR, as torch's store does, may listen
on it.

Standard library only: SGLang's launcher holds one too.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """A port of all addresses of this host, of both families; held until ``close``.

    Holding it exposes nothing: no connection is accepted.

    Raises:
        OSError: if the host has none left.
    """

    def __init__(self) -> None:
        self._socket = _bound(socket.AF_INET6, "::") or _bound(socket.AF_INET, "0.0.0.0")
        if self._socket is None:
            raise OSError("no port could be bound")
        self.port: int = self._socket.getsockname()[1]
        """Its number."""

    def close(self) -> None:
        """Let go of it: who listens on it by now goes on. Idempotent."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bound(family: socket.AddressFamily, address: str) -> socket.socket | None:
    try:
        held = socket.socket(family)
    except OSError:
        return None  # a host without IPv6
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((address, 0))
    except OSError:
        held.close()
        return None
    return held
