"""The thread of an attempt's Ray: whoever ends it need not wait until it has started."""

import importlib
import threading
from typing import Any

import pytest

from runtime.errors import SessionLost
from runtime.session.joined import JoinedRay
from runtime.session.ray_thread import RayThread

LONG_S = 60.0


class Calls:
    """Records what was called, in which thread; connecting waits until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: list[str] = []
        self.threads: set[int] = set()
        self.is_connecting, self.may_connect = threading.Event(), threading.Event()

    def connect(self) -> None:
        self.note("connect")
        self.is_connecting.set()
        assert self.may_connect.wait(LONG_S)
        if self.error is not None:
            raise self.error

    def disconnect(self) -> None:
        self.note("disconnect")

    def note(self, what: str) -> None:
        self.made.append(what)
        self.threads.add(threading.get_ident())


def test_one_thread_connects_and_disconnects() -> None:
    calls = Calls()
    calls.may_connect.set()
    thread = RayThread(calls.connect, calls.disconnect)
    thread.start(LONG_S)
    assert calls.made == ["connect"]
    for _ in range(2):
        thread.end(LONG_S)
        assert calls.made == ["connect", "disconnect"]
    assert len(calls.threads) == 1
    assert threading.get_ident() not in calls.threads


def test_a_start_that_is_ended_waits_no_longer_and_leaves_no_connection() -> None:
    calls = Calls()
    thread = RayThread(calls.connect, calls.disconnect)
    raised: list[BaseException] = []

    def start() -> None:
        try:
            thread.start(LONG_S)
        except SessionLost as error:
            raised.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert calls.is_connecting.wait(LONG_S)
    thread.end(0.0)
    starting.join(LONG_S)
    assert [str(error) for error in raised] == ["the start of Ray was given up"]
    assert calls.made == ["connect"]  # nothing can interrupt that
    calls.may_connect.set()
    thread.end(LONG_S)
    assert calls.made == ["connect", "disconnect"]


def test_what_was_ended_before_it_began_connects_to_nothing() -> None:
    calls = Calls()
    thread = RayThread(calls.connect, calls.disconnect)
    thread.end(LONG_S)
    with pytest.raises(SessionLost):
        thread.start(LONG_S)
    thread.end(LONG_S)
    assert calls.made == []


def test_a_failure_to_connect_is_told_and_cleared_up_after() -> None:
    calls = Calls(ConnectionError("no such address"))
    calls.may_connect.set()
    thread = RayThread(calls.connect, calls.disconnect)
    with pytest.raises(ConnectionError, match="no such address"):
        thread.start(LONG_S)
    thread.end(LONG_S)
    assert calls.made == ["connect", "disconnect"]


def test_nodes_that_nobody_wants_any_more_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster whose nodes are taken, and a session that is asked to leave meanwhile."""
    is_waiting, is_let_go = threading.Event(), threading.Event()

    class Taken:
        def wait(self, timeout_seconds: float) -> bool:
            is_waiting.set()
            return threading.Event().wait(min(timeout_seconds, 0.01))

    class Joined(JoinedRay):
        def _connect(self) -> None:
            pass

        def _disconnect(self) -> None:
            is_let_go.set()

    # The package's own name for it is a function.
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group", lambda *args, **more: Taken())
    topology: Any = type("Two", (), {"replicas": 2, "gpus_per_replica": 0})
    ray = Joined(topology, address="x", env={}, placement_deadline_s=3600.0)
    raised: list[BaseException] = []

    def start() -> None:
        try:
            ray.start()
        except SessionLost as error:
            raised.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert is_waiting.wait(LONG_S)
    ray.stop()
    starting.join(LONG_S)
    assert [str(error) for error in raised] == ["the start of Ray was given up"]
    assert is_let_go.is_set()
