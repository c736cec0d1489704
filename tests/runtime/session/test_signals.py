import os
import signal

import pytest

from runtime.clock import ManualClock
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.session.ends import EndedBy
from runtime.session.signals import Signals

GRACE_S = 60.0


class Watched:
    def __init__(self, root: RunRoot, *, detached: bool = True) -> None:
        self.clock = ManualClock()
        self.control = Control(root)
        self.signals = Signals.of(
            root, epoch=3, detached=detached, detach_grace_s=GRACE_S, clock=self.clock
        )
        self._attached = root.control / "attached"
        self._ns = 0

    def asked(self) -> EndedBy | None:
        end = self.signals.end_requested()
        return None if end is None else end.by

    def attach(self) -> None:
        """As ``Control.attach``, at a time that surely differs from the last."""
        self.control.attach()
        self._ns += 1
        os.utime(self._attached, ns=(self._ns, self._ns))

    def later(self, seconds: float) -> EndedBy | None:
        self.clock.advance(seconds)
        return self.asked()


def test_nobody_asked(root: RunRoot) -> None:
    assert Watched(root).asked() is None


@pytest.mark.parametrize(
    ("mode", "by"), [("stop", EndedBy.STOP), ("final", EndedBy.STOP_FINAL), ("now", EndedBy.STOP)]
)
def test_a_stop_file_is_an_end(root: RunRoot, mode: str, by: EndedBy) -> None:
    watched = Watched(root)
    watched.control.request_stop(mode, epoch=3, by="a person", time=0.0)  # type: ignore[arg-type]
    assert watched.asked() is by
    assert watched.asked() is by  # it stands


def test_a_stop_for_another_epoch_is_none(root: RunRoot) -> None:
    watched = Watched(root)
    for epoch in (2, 4):
        watched.control.request_stop("stop", epoch=epoch, by="a person", time=0.0)
        assert watched.asked() is None


def test_final_wins_over_stop_and_over_sigterm(root: RunRoot) -> None:
    watched = Watched(root)
    watched.signals.on_signal(signal.SIGTERM)
    assert watched.asked() is EndedBy.SIGTERM
    watched.control.request_stop("stop", epoch=3, by="a person", time=0.0)
    assert watched.asked() is EndedBy.STOP
    watched.control.request_stop("final", epoch=3, by="a person", time=0.0)
    assert watched.asked() is EndedBy.STOP_FINAL


def test_sigterm_is_remembered(root: RunRoot) -> None:
    watched = Watched(root)
    watched.signals.on_signal(signal.SIGTERM)
    assert watched.later(1e6) is EndedBy.SIGTERM


def test_nobody_attached_for_longer_than_the_grace_parks(root: RunRoot) -> None:
    watched = Watched(root, detached=False)
    assert watched.asked() is None
    assert watched.later(GRACE_S) is None
    assert watched.later(0.5) is None  # the first look that finds it lapsed decides nothing
    assert watched.later(1.0) is EndedBy.PARKED


def test_a_session_that_was_frozen_looks_twice(root: RunRoot) -> None:
    watched = Watched(root, detached=False)
    watched.attach()
    assert watched.asked() is None
    assert watched.later(1e5) is None  # SIGSTOP, SIGCONT: everybody was frozen
    watched.attach()
    assert watched.later(0.9) is None
    assert watched.later(GRACE_S) is None


def test_a_poll_now_and_then_keeps_a_session(root: RunRoot) -> None:
    watched = Watched(root, detached=False)
    for _ in range(100):
        watched.attach()
        assert watched.later(GRACE_S * 0.9) is None
    assert watched.later(GRACE_S + 0.1) is None
    assert watched.later(1.0) is EndedBy.PARKED


def test_a_detached_run_needs_nobody(root: RunRoot) -> None:
    watched = Watched(root)
    assert watched.later(1e9) is None
    assert watched.later(1e9) is None
