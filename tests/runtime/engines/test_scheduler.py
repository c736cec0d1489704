"""The queue's rules that HTTP cannot show: its clock, its order, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from runtime.clock import ManualClock
from runtime.engines.embedded.decoder import Decoder
from runtime.engines.embedded.requests import (
    ENGINE_STOPPED,
    RAN_TOO_LONG,
    WAITED_TOO_LONG,
    Request,
    SamplingParams,
)
from runtime.engines.embedded.scheduler import (
    DuplicateRid,
    EngineStopped,
    Progress,
    QueueFull,
    Scheduler,
)
from tests.contracts.tiny_models import tiny_qwen3

WAIT_S = 20.0


class Watched:
    """A scheduler whose deliveries can be waited for."""

    def __init__(self, *, max_running: int = 1, **limits: Any) -> None:
        torch.set_num_threads(1)
        self.clock = ManualClock()
        self.ends: dict[str, Future[Request]] = {}
        self.order: list[str] = []
        self.failed = threading.Event()
        decoder = Decoder(
            tiny_qwen3(3).requires_grad_(False),
            max_running=max_running,
            context_length=4096,
            max_total_tokens=100_000,
        )
        self.scheduler = Scheduler(
            decoder,
            self._deliver,
            clock=self.clock.monotonic,
            on_failure=self.failed.set,
            **{"max_queued": None, **limits},
        )
        self.scheduler.start()

    def submit(self, rid: str, max_new: int = 4000) -> Future[Request]:
        params = SamplingParams(
            max_new_tokens=max_new, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0,
            stop_token_ids=(), stop=(), seed=None,
        )  # fmt: skip
        self.ends[rid] = Future()
        self.scheduler.submit([Request(rid=rid, prompt=(1, 2, 3), params=params)])
        return self.ends[rid]

    def between(self, work: Any) -> Any:
        return self.scheduler.between_steps(work).result(WAIT_S)

    def until_running(self, rid: str) -> None:
        while rid not in self.between(lambda: [r.rid for r in self.scheduler.decoder.running()]):
            pass

    def _deliver(self, progress: list[Progress]) -> None:
        for report in progress:
            if report.finish is not None:
                self.order.append(report.request.rid)
                self.ends[report.request.rid].set_result(report.request)


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    made = Watched(**getattr(request, "param", {}))
    yield made
    made.scheduler.stop(WAIT_S)
    assert not made.scheduler.is_alive


def message(ended: Future[Request]) -> object:
    finish = ended.result(WAIT_S).finish
    assert finish is not None
    return finish.get("message")


def test_requests_end_in_the_order_they_came(watched: Watched):
    ends = [watched.submit(str(i), 3) for i in range(4)]
    for end in ends:
        end.result(WAIT_S)
    assert watched.order == ["0", "1", "2", "3"]


@pytest.mark.parametrize("watched", [{"waiting_timeout_s": 10.0}], indirect=True)
def test_waiting_ends_after_its_limit_and_not_before(watched: Watched):
    watched.submit("runs")
    watched.until_running("runs")
    waits = watched.submit("waits")
    watched.clock.advance(9.9)
    watched.between(lambda: None)
    assert not waits.done()
    watched.clock.advance(0.2)
    assert message(waits) == WAITED_TOO_LONG
    assert not watched.ends["runs"].done()


@pytest.mark.parametrize(
    "watched", [{"waiting_timeout_s": 10.0, "running_timeout_s": 10.0}], indirect=True
)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_deadline_runs_while_paused(watched: Watched, mode: Any):
    runs = watched.submit("runs")
    watched.until_running("runs")
    waits = watched.submit("waits")
    watched.between(lambda: watched.scheduler.pause(mode))
    watched.clock.advance(1000.0)
    watched.between(watched.scheduler.resume)
    watched.until_running("runs")
    assert not runs.done()
    assert not waits.done()
    watched.clock.advance(11.0)
    assert {message(runs), message(waits)} == {RAN_TOO_LONG, WAITED_TOO_LONG}


@pytest.mark.parametrize("watched", [{"max_running": 2}], indirect=True)
def test_retracted_requests_go_before_those_that_waited(watched: Watched):
    first, second = watched.submit("first", 2000), watched.submit("second", 2000)
    watched.until_running("second")
    watched.submit("third", 5)
    watched.between(lambda: watched.scheduler.pause("retract"))
    assert watched.scheduler.num_waiting == 3
    watched.between(watched.scheduler.resume)
    watched.until_running("first")
    watched.until_running("second")
    assert not watched.ends["third"].done()
    watched.between(watched.scheduler.abort_all)
    assert first.result(WAIT_S).num_retractions == second.result(WAIT_S).num_retractions == 1


@pytest.mark.parametrize("watched", [{"max_queued": 2}], indirect=True)
def test_a_refused_call_leaves_nothing_behind(watched: Watched):
    watched.between(lambda: watched.scheduler.pause("in_place"))
    watched.submit("a")
    watched.submit("b")
    with pytest.raises(QueueFull):
        watched.submit("c")
    with pytest.raises(DuplicateRid):
        watched.submit("a")
    watched.ends["a"] = watched.ends["b"] = Future()
    assert watched.scheduler.num_waiting == 2
    watched.ends["a"], watched.ends["b"] = Future(), Future()
    watched.between(watched.scheduler.abort_all)
    watched.submit("c", 2)
    watched.between(watched.scheduler.resume)
    assert len(watched.ends["c"].result(WAIT_S).output) == 2


def test_a_failed_step_ends_everyone_and_is_reported(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    runs = watched.submit("runs")
    watched.until_running("runs")
    waits = watched.submit("waits")

    def broken() -> list[Request]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(watched.scheduler.decoder, "step", broken)
    assert message(runs) == message(waits) == ENGINE_STOPPED
    assert watched.failed.wait(WAIT_S)
    with pytest.raises(EngineStopped):
        watched.submit("late")
    with pytest.raises(EngineStopped):
        watched.scheduler.between_steps(lambda: None)


def test_failed_work_belongs_to_whoever_asked(watched: Watched):
    def broken() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        watched.between(broken)
    assert len(watched.submit("next", 2).result(WAIT_S).output) == 2


def test_stop_drops_what_runs_without_a_failure(watched: Watched):
    runs = watched.submit("runs")
    watched.until_running("runs")
    watched.scheduler.stop(WAIT_S)
    assert message(runs) == ENGINE_STOPPED
    assert not watched.failed.is_set()
