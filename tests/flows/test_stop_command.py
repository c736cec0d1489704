"""`stop`: who is asked, what is said when nobody runs, and waiting that ends."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import build_app
from flows.commands._attached import Attached
from flows.commands._following import interrupts_stop
from runtime.clock import ManualClock
from runtime.rundir.control import Control
from runtime.session.stopping import wait_ended
from tests.flows.made_run import MadeRun, dead


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


@pytest.fixture
def live(made: MadeRun) -> MadeRun:
    made.begin()
    made.commit(0)
    made.view(update=1)
    return made


def stop(made: MadeRun, *more: str) -> tuple[int, dict]:
    arguments = ["stop", str(made.root.path), "--json", *more]
    done = CliRunner().invoke(build_app(arguments), arguments)
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("flag", "mode"), [((), "stop"), (("--final",), "final"), (("--now",), "now")]
)
def test_the_running_epoch_is_asked(live: MadeRun, flag: tuple[str, ...], mode: str) -> None:
    code, answer = stop(live, "--no-wait", *flag)
    assert (code, answer["how"], answer["epoch"]) == (0, "asked", 1)
    request = Control(live.root).stop_request(1)
    assert request is not None
    assert request.mode == mode


def test_asking_twice_keeps_the_first_request(live: MadeRun) -> None:
    stop(live, "--no-wait")
    first = Control(live.root).stop_request(1)
    stop(live, "--no-wait")
    assert Control(live.root).stop_request(1) == first


@pytest.mark.parametrize("how", ["attached", "following"])
def test_ctrl_c_after_the_end_is_for_no_later_epoch(live: MadeRun, how: str) -> None:
    """A terminal that still shows the end is not the next run's."""
    control = Control(live.root)
    before = signal.getsignal(signal.SIGINT)
    attached = Attached(live.root, live.file, [], 1)
    with interrupts_stop(live.root) if how == "following" else nullcontext():
        if how == "attached":
            signal.signal(signal.SIGINT, attached._interrupted)
        try:
            signal.raise_signal(signal.SIGINT)
            assert control.stop_request(1).mode == "stop"
            live.end("training", 1, activity="stopped", ended_by="stop")
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
    assert control.stop_request(1).mode == "stop"
    assert control.stop_request(2) is None


def obey(made: MadeRun, state: str, asked: threading.Event, **more) -> threading.Thread:
    """A session that ends once it sees the request."""

    def run() -> None:
        control = Control(made.root)
        while control.stop_request(1) is None:
            if asked.wait(0.01):
                return
        made.end(state, 1, **more)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("state", "activity", "failure", "code"),
    [("training", "stopped", None, 0), ("complete", None, None, 0), ("failed", None, dead(), 4)],
)
def test_it_waits_for_the_end_and_tells_how_it_was(
    live: MadeRun, state: str, activity: str | None, failure, code: int
) -> None:
    never = threading.Event()
    thread = obey(live, state, never, activity=activity, failure=failure, ended_by="stop")
    found, answer = stop(live)
    never.set()
    thread.join()
    assert found == code
    assert (answer["ended"], answer["state"], answer["activity"]) == (True, state, activity)
    assert answer["update"] == 1


def test_a_deadline_that_passes_is_3(live: MadeRun) -> None:
    code, answer = stop(live, "--deadline", "0")
    assert (code, answer["ended"]) == (3, False)


def test_an_owner_that_is_gone_is_not_waited_for(made: MadeRun) -> None:
    made.begin(pid=2**22 + 1)
    code, answer = stop(made)
    assert (code, answer["ended"]) == (6, False)


def test_an_attempt_that_never_owned_the_run_is_not_waited_for(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    made.claim(2)
    clock = ManualClock()

    def die(seconds: float) -> None:
        clock.advance(seconds)
        path = made.root.attempt(2).claim
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 1}))

    assert stop(made, "--no-wait")[1]["epoch"] == 2
    assert wait_ended(made.root, 2, deadline_s=100, clock=clock, sleep=die) is None
    assert clock.monotonic() < 1005


@pytest.mark.parametrize("activity", ["stopped", "parked"])
def test_a_run_that_stands_still_is_left_as_it_is(made: MadeRun, activity: str) -> None:
    made.begin()
    made.end("training", 0, activity=activity)
    code, answer = stop(made)
    assert (code, answer["how"]) == (0, "over")
    assert Control(made.root).stop_request(2) is None


def test_final_of_a_stopped_run_is_for_its_next_epoch(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    code, answer = stop(made, "--final")
    assert (code, answer["how"], answer["epoch"]) == (0, "next", 2)
    request = Control(made.root).stop_request(2)
    assert request is not None
    assert request.mode == "final"


def test_a_complete_run_is_over_for_every_mode(made: MadeRun) -> None:
    made.run_to(4)
    for flag in ((), ("--final",), ("--now",)):
        assert stop(made, *flag)[1]["how"] == "over"
    assert not list(made.root.control.glob("stop*"))


def test_without_a_run_there_is_nothing_to_stop(made: MadeRun) -> None:
    made.root.create()
    assert stop(made)[0] == 6


def test_final_and_now_exclude_each_other(live: MadeRun) -> None:
    arguments = ["stop", str(live.root.path), "--final", "--now"]
    assert CliRunner().invoke(build_app(arguments), arguments).exit_code == 2
    assert Control(live.root).stop_request(1) is None
