"""A Prefect server that is away costs what would have been shown, and nothing of the run."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import uuid4

import httpx
import pytest
from prefect.exceptions import PrefectException, TerminationSignal

from tasks import artifacts, display, phases
from tasks.artifacts import StretchProgress
from tasks.display import only_display
from tasks.ended import RunEnded

TROUBLE = [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), PrefectException(), OSError()]


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "get_run_logger", lambda: logging.getLogger("test"))


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


def test_what_the_run_says_goes_through() -> None:
    with pytest.raises(RunEnded), only_display("x"):
        raise RunEnded("stopped", state="training", activity="stopped")
