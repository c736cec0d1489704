"""Following a run in plain lines, one per change, until it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from runtime.rundir import workflow
from runtime.rundir.control import StopMode
from runtime.rundir.layout import RunRoot
from runtime.rundir.workflow import Workflow
from runtime.session.answers import Held, Lost, Running
from runtime.session.ensure import ensure
from runtime.session.stopping import ask_to_stop

POLL_S = 0.5


def follow(
    root: RunRoot,
    say: Callable[[str], None],
    *,
    timeout_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Say every change until the run ends; every look counts as being attached.

    Returns:
        Whether it ended; False where ``timeout_s`` passed first.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    said = ""
    while True:
        answer = ensure(root, "finish", timeout_s=0.0)
        line = said
        match answer:
            case Running(view=view, what=what, is_stale=is_stale):
                line = what if view is None else describe(view)
                line += "  (no sign of life)" if is_stale else ""
            case Held(failure=failure):
                line = f"held in {failure.step}: {failure.message}; then: milepost resume"
            case Lost(reason=reason):
                say(f"lost: {reason}")
                return True
            case _:
                # The guard may still be writing its last view: the caller looks for itself.
                if (view := workflow.read(root)) is not None:
                    say(describe(view))
                return True
        if line != said:
            say(line)
            said = line
        if until is not None and time.monotonic() >= until:
            return False
        sleep(POLL_S)


def describe(view: Workflow) -> str:
    """The view in one line that changes only when something moved."""
    words = [view.state, view.activity or view.ended_by or ""]
    of = f"/{view.expected.updates}" if view.expected.updates else ""
    words += [f"update {view.update}{of}", view.step or ""]
    words += [f"{name} {value}" for name, value in view.detail.items()]
    return "  ".join(word for word in words if word)


@contextmanager
def interrupts_stop(root: RunRoot) -> Generator[None]:
    """Ctrl-C once commits and stops the run, twice stops it now."""
    count = 0

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal count
        del number, frame
        count += 1
        mode: StopMode = "stop" if count == 1 else "now"
        ask_to_stop(root, mode, by="Ctrl-C", time_s=time.time())

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
