import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime.clock import ManualClock
from runtime.telemetry.events import Event
from runtime.telemetry.rows import Owner, RowWriter
from runtime.telemetry.timing import Stage, StageTimer


class Bench:
    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(100.0)
        self.rows = RowWriter(path, Owner(attempt=1, epoch=1), clock=self.clock)
        self.timer = StageTimer(self.rows, clock=self.clock)

    def read(self) -> list[dict[str, object]]:
        self.rows.close()
        return [json.loads(line) for line in self.rows.path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "driver_timing.jsonl")


def test_a_stage_becomes_one_row_with_its_cost_and_time(bench: Bench) -> None:
    with bench.timer.stage(Stage.TRAIN, update=3, num_tokens=17):
        bench.clock.advance(0.5)
    (row,) = bench.read()
    assert row["name"] == "train"
    assert row["cost"] == "optimisation"
    assert (row["update"], row["start"], row["duration_s"]) == (3, 100.0, 0.5)
    assert row["num_tokens"] == 17
    assert row["error"] is None


def test_the_first_run_of_a_stage_is_cold_unless_said_otherwise(bench: Bench) -> None:
    for update in (1, 2):
        with bench.timer.stage(Stage.TRAIN, update=update):
            pass
    with bench.timer.stage(Stage.TRAIN, update=3) as stage:
        stage.cold = True  # a recompilation noticed on the way
    bench.timer.record(Stage.COMMIT, start=1.0, duration_s=2.0, update=3, cold=False)
    bench.timer.record(Stage.CACHE_RESTORE, start=1.0, duration_s=2.0)
    assert [row["cold"] for row in bench.read()] == [True, False, True, False, True]


def test_stages_may_overlap_and_end_in_any_order(bench: Bench) -> None:
    outer = bench.timer.stage(Stage.COMMIT, update=1)
    inner = bench.timer.stage(Stage.TRAIN, update=2)
    outer.__enter__()
    bench.clock.advance(1)
    inner.__enter__()
    assert bench.timer.open_stages() == [(Stage.COMMIT, 1.0), (Stage.TRAIN, 0.0)]
    bench.clock.advance(1)
    outer.__exit__(None, None, None)
    bench.clock.advance(1)
    inner.__exit__(None, None, None)
    rows = bench.read()
    assert [(row["name"], row["duration_s"]) for row in rows] == [("commit", 2.0), ("train", 2.0)]
    assert rows[0]["span_id"] != rows[1]["span_id"]
    assert bench.timer.open_stages() == []


def test_a_stage_that_raises_is_recorded_and_lets_the_error_through(bench: Bench) -> None:
    with pytest.raises(KeyError), bench.timer.stage(Stage.PUBLISH, update=1):
        raise KeyError("x")
    assert bench.read()[0]["error"] == "KeyError"


@pytest.mark.parametrize("fails", [False, True])
def test_a_span_has_two_ends_with_one_id(bench: Bench, fails: bool) -> None:
    import structlog

    wrapper = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(10))
    try:
        with capture_logs() as logs:
            try:
                with bench.timer.stage(Stage.TRAIN, update=1):
                    if fails:
                        raise ValueError
            except ValueError:
                pass
    finally:
        structlog.configure(wrapper_class=wrapper)
    assert [line["event"] for line in logs] == [
        Event.STAGE_STARTED,
        Event.STAGE_FAILED if fails else Event.STAGE_FINISHED,
    ]
    assert len({line["span_id"] for line in logs}) == 1
