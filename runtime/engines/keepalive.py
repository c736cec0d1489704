"""How long idle HTTP connections live on each side.

A client may write on a kept connection just as the server closes it. With equal values that race is
lost now and then; with the server's value well above the client's it cannot happen: the client has
let go of the connection long before the server does. The values touch neither admission nor slots
nor generation time; idle sockets just live longer.
"""

from __future__ import annotations

from runtime.errors import ConfigError

SERVER_KEEPALIVE_S = 60.0
"""Servers (engine, router) keep an idle connection at least this long."""

CLIENT_KEEPALIVE_S = 5.0
"""Clients reuse an idle connection for at most this long, whichever library they use."""

MIN_RATIO = 2.0
"""The server's value must be this many times the client's."""


def check_keepalive_order(
    *, server_s: float = SERVER_KEEPALIVE_S, client_s: float = CLIENT_KEEPALIVE_S
) -> None:
    """Refuse keep-alive values that race.

    Raises:
        ConfigError: unless 0 < client_s and server_s >= 2 * client_s.
    """
    if not client_s > 0.0:
        raise ConfigError(
            f"client keep-alive must be above 0 s, got {client_s:g} s", client_s=client_s
        )
    if not server_s >= MIN_RATIO * client_s:
        raise ConfigError(
            f"server keep-alive {server_s:g} s must be at least {MIN_RATIO:g} x the client's "
            f"{client_s:g} s: equal values race; raise the server's",
            server_s=server_s,
            client_s=client_s,
        )
