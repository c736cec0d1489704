"""A held port against the system that hands ports out, and against the store it is held for."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from runtime.engines.held_port import HeldPort


def test_no_two_holders_have_one_port():
    held = [HeldPort() for _ in range(100)]
    assert len({port.port for port in held}) == 100
    for port in held:
        port.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_nobody_who_does_not_know_of_it_can_bind_it(address: str):
    with HeldPort() as held:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, held.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.port), timeout=20)


def test_nobody_who_asks_for_any_port_gets_it():
    with HeldPort() as held:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        assert held.port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()


def test_torchs_store_listens_on_it_while_it_is_held_and_after():
    with HeldPort() as held:
        store = TCPStore("127.0.0.1", held.port, 1, is_master=True, timeout=timedelta(seconds=20))
        store.set("a", "b")
    held.close()
    other = TCPStore("127.0.0.1", held.port, None, False, timeout=timedelta(seconds=20))
    assert other.get("a") == b"b"
