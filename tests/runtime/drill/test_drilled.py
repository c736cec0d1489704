"""A drilled run is waited for while there is hope; what it wrote down says when a rewind is due."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.drill.dealing import _overtaken
from runtime.drill.drilled import DrilledRun
from runtime.drill.job import make_job
from runtime.errors import WaitTimeout
from runtime.faults.plan import Kind
from runtime.rundir.atomic import write_new
from runtime.rundir.records import Record, encode
from tests.runtime.drill.records import chain, commit, epoch

WAITS = [sys.executable, "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrilledRun:
    """A run whose attendants do nothing; what it writes is written by the test."""
    job = make_job(tmp_path / "job", tmp_path, "ahead", updates=8)
    job.root.create()
    monkeypatch.setattr(DrilledRun, "_attend", lambda self: subprocess.Popen(WAITS))
    return DrilledRun(job)


def write(run: DrilledRun, *records: Record) -> None:
    for record in chain(*records):
        write_new(run.job.root.chain / f"{record.seq}.json", encode(record))


def test_epochs_without_a_commit_are_not_counted_for_ever(run: DrilledRun) -> None:
    write(run, epoch(1), commit(1, 0), *(epoch(number) for number in range(2, 40)))
    with run, pytest.raises(WaitTimeout, match="38 epochs came to no commit: none of them said"):
        run.until(lambda: False, "the next commit")


def test_a_time_from_a_clock_that_jumped_is_not_believed(run: DrilledRun) -> None:
    began = time.time()
    ahead = commit(1, 2).model_copy(update={"time": began + 7200.0})
    write(run, epoch(1).model_copy(update={"time": began}), ahead)
    run.observer.look()
    taken, committed = run.observer.seen
    assert taken.time == began
    assert began <= committed.time <= time.time()


def test_both_attendants_are_ended_with_the_run(run: DrilledRun) -> None:
    with run:
        second = run.attend_twice()
        assert run.attend_twice() == second != run.attendant
        processes = [run._attendant, run._second]
    assert [p is not None and p.poll() for p in processes] == [-9, -9]


def test_a_fault_takes_the_place_of_the_one_before(run: DrilledRun) -> None:
    first = run.arm("attempt.link", Kind.SLOW, seconds=0.0, times=2)
    run.plan.reach("attempt.link")
    second = run.arm("commit.record", Kind.DROP)
    assert run.plan.reach("attempt.link") is None
    assert run.plan.reach("commit.record") is Kind.DROP
    assert [fired.id for fired in run.plan.fired()] == [first.id, second.id]
    run.disarm()
    assert run.plan.reach("commit.record") is None


@pytest.mark.parametrize(
    ("evaluated", "state", "expected"),
    [
        ("e1.u4", "succeeded", True),
        ("e1.u4", "failed", False),
        ("e1.u2", "succeeded", False),
        ("e0.u4", "succeeded", False),
    ],
)
def test_an_evaluation_ahead_of_its_commit_is_seen(
    run: DrilledRun, evaluated: str, state: str, expected: bool
) -> None:
    write(run, epoch(1), commit(1, 2))
    result = run.job.root.evaluations / evaluated / "held" / "tries" / "1" / "result.json"
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"state": state}))
    run.observer.look()
    assert _overtaken(run) is expected
