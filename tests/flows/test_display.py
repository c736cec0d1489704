"""A Prefect server that is away costs what would have been shown, and nothing of the run."""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import uuid4

import httpx
import pytest
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.settings import PREFECT_UI_URL, temporary_settings
from prefect.states import State, StateType

from flows.commands import resubmit_evaluations
from runtime.evaluation.reading import receipts_of
from runtime.evaluation.submission import Row
from runtime.rundir.control import Control
from runtime.rundir.liveness import Mark
from tasks import artifacts, attach, display, phases, resubmission
from tasks.artifacts import StretchProgress
from tasks.attach import staying_attached
from tasks.display import only_display, show, show_again, show_rest
from tasks.ended import RunEnded
from tests.flows.made_run import MadeRun

TROUBLE = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), PrefectException(), OSError()]


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(display, "_waiting", {})
    be_flow_run(monkeypatch, "one")


def be_flow_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(display, "flow_run", SimpleNamespace(id=name))


class Server:
    """Keeps: while it is away every call fails; what it took, it took once."""

    def __init__(self) -> None:
        self.is_up = False
        self.shown: list[str] = []

    def takes(self, text: str) -> Any:
        def call() -> None:
            if not self.is_up:
                raise httpx.ConnectError("refused")
            self.shown.append(text)

        return call


def raising(error: Exception) -> Any:
    def call(*_: object, **__: object) -> NoReturn:
        raise error

    return call


@pytest.mark.parametrize("error", TROUBLE, ids=lambda each: type(each).__name__)
def test_trouble_with_the_server_ends_no_flow(error, monkeypatch) -> None:
    monkeypatch.setattr(phases, "flow_run", SimpleNamespace(id=str(uuid4())))
    monkeypatch.setattr(phases, "get_client", raising(error))
    phases.enter_phase("Training")
    monkeypatch.setattr(artifacts, "create_progress_artifact", raising(error))
    bar = StretchProgress(SimpleNamespace(key="k"), SimpleNamespace(title="t"))  # type: ignore[arg-type]
    bar.finish()


def test_a_server_that_does_not_answer_is_no_order_to_stop(monkeypatch) -> None:
    monkeypatch.setattr(phases, "flow_run", SimpleNamespace(id=str(uuid4())))
    monkeypatch.setattr(phases, "get_client", raising(httpx.ConnectError("refused")))
    with pytest.raises(TerminationSignal), phases.stopping_when_cancelled(nullcontext()):  # type: ignore[arg-type]
        raise TerminationSignal(signal=15)


def test_half_a_row_costs_the_table_that_row(tmp_path) -> None:
    rows = [
        {"axis": "rollout/collection", "step": step, "epoch": epoch, "values": {}}
        for step, epoch in ((1, 1), (2, 2), (2, 1))
    ]
    whole = "".join(f"{json.dumps(row)}\n" for row in rows)
    torn = json.dumps(rows[0])[:-9] + "\n"
    (tmp_path / "metrics.jsonl").write_text(torn + whole)
    run = SimpleNamespace(root=SimpleNamespace(path=tmp_path))
    found = list(artifacts._rows(run))  # type: ignore[arg-type]
    assert found == rows[:2]


def test_a_row_of_the_table_links_to_its_job_in_a_word(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.begin()
    made.commit(0)
    made.evaluate(4)
    ((folder, receipt),) = receipts_of(made.root, made.chain.read())
    row = Row(
        root=made.root, folder=folder, receipt=receipt, verdict="done", why="a result stands",
        job="id",
    )  # fmt: skip
    with temporary_settings({PREFECT_UI_URL: "http://ui"}):
        assert resubmission._as_line(row)["link"] == "[flow run](http://ui/runs/flow-run/id)"
    assert resubmission._as_line(replace(row, job=None))["link"] == ""


def test_an_evaluation_that_cannot_be_read_has_a_row_like_any_other(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.begin()
    made.commit(0)
    made.evaluate(4)
    ((folder, receipt),) = receipts_of(made.root, made.chain.read())
    row = Row(root=made.root, folder=folder, receipt=receipt, verdict="done", why="stands")
    damaged = replace(row, receipt=None, verdict="reported", why="torn")
    for shown in (resubmission._as_line, resubmit_evaluations._as_object):
        assert set(shown(damaged)) == set(shown(row))
        assert (shown(damaged)["update"], shown(damaged)["set"]) == (4, "holdout")
    assert resubmission._as_line(damaged)["pass"] == "reported: torn"


def test_the_summary_shows_results_that_stand_past_what_cannot_be_read(tmp_path: Path) -> None:
    made = MadeRun(tmp_path)
    made.begin()
    first = made.commit(0)
    made.evaluate(4)
    made.begin(restored=first)
    made.evaluate(2)
    made.evaluate(4, state="skipped")
    torn = made.root.evaluation("e2.u6", "holdout") / "tries" / "0" / "result.json"
    made.evaluate(6)
    torn.write_text("{")
    run = SimpleNamespace(root=made.root)
    assert list(artifacts._evaluations(run)) == [("e2.u2 holdout", 0.5)]  # type: ignore[arg-type]


def test_what_the_run_says_goes_through() -> None:
    with pytest.raises(RunEnded), only_display("x"):
        raise RunEnded("stopped", state="training", activity="stopped")


def test_what_a_server_missed_is_shown_in_order_once_it_is_back(monkeypatch) -> None:
    server = Server()
    for what, text in [
        ("table 1", "a"),
        ("phase", "Held"),
        ("table 2", "b"),
        ("phase", "Training"),
    ]:
        show(what, server.takes(text))
    be_flow_run(monkeypatch, "two")
    show("table 1", server.takes("of another flow"))
    be_flow_run(monkeypatch, "one")
    assert not show_again()
    server.is_up = True
    assert show_again()
    assert server.shown == ["a", "b", "Training"], "of the phases the last one counts"
    assert show_again()
    assert len(server.shown) == 3
    be_flow_run(monkeypatch, "two")
    assert show_again()
    assert server.shown[3:] == ["of another flow"]


def test_what_is_shown_at_last_takes_the_place_of_what_was_missed() -> None:
    server = Server()
    show("phase", server.takes("Held"))
    server.is_up = True
    show("phase", server.takes("Training"))
    assert show_again()
    assert server.shown == ["Training"]


def test_a_server_that_never_comes_back_costs_bounded_memory_and_time() -> None:
    server = Server()
    for number in range(10 * display.MAX_WAITING):
        show(f"table {number}", server.takes(str(number)))
    assert len(display._waiting) == display.MAX_WAITING
    tries: list[float] = []
    show_rest(0.0, sleep=tries.append)
    assert tries == []

    def back(_: float) -> None:
        server.is_up = True

    show_rest(60.0, sleep=back)
    assert server.shown[-1] == str(10 * display.MAX_WAITING - 1)


def test_a_defect_of_ours_is_no_trouble_of_the_server() -> None:
    with pytest.raises(ZeroDivisionError):
        show("x", lambda: 1 / 0)


@pytest.mark.parametrize(
    ("state", "is_stopped"),
    [(StateType.CANCELLING, True), (StateType.CANCELLED, True), (StateType.RUNNING, False)],
)
def test_a_cancellation_that_no_signal_brought_stops_the_run(
    tmp_path, monkeypatch, state, is_stopped
) -> None:
    monkeypatch.chdir(tmp_path)
    made = MadeRun(tmp_path)
    made.begin()
    found = SimpleNamespace(state=State(type=state))
    client = nullcontext(SimpleNamespace(read_flow_run=lambda _: found))
    monkeypatch.setattr(phases, "flow_run", SimpleNamespace(id=str(uuid4())))
    monkeypatch.setattr(phases, "get_client", lambda **_: client)
    for _ in range(2):
        phases.heed_cancellation(SimpleNamespace(root=made.root))  # type: ignore[arg-type]
    asked = Control(made.root).stop_request(1)
    assert (asked is not None) == is_stopped
    if asked is not None:
        assert (asked.mode, asked.by) == ("stop", "prefect cancellation")


def test_a_flow_that_waits_for_the_server_stays_attached(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attach, "_EVERY_S", 0.01)
    root = MadeRun(tmp_path).root
    control = Control(root)

    def renewed_since(before: Mark | None) -> Mark:
        while (mark := control.attached()) is None or mark == before:
            time.sleep(0.005)
        return mark

    with staying_attached(SimpleNamespace(root=root)):  # type: ignore[arg-type]
        first = renewed_since(None)
        renewed_since(first)
    after = control.attached()
    time.sleep(0.05)
    assert control.attached() == after
