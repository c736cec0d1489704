"""The fault plan itself: what it does, and that its count survives the process it kills."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import anyio
import pytest

from runtime import faults
from runtime.clock import SystemClock
from runtime.errors import DiskFull
from runtime.faults import Fault, FaultPlan, Kind
from runtime.faults.plan import file_point
from runtime.rundir import atomic

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultPlan:
    made = FaultPlan(tmp_path / "faults")
    monkeypatch.setattr(faults, "plan", made)
    monkeypatch.setattr(atomic, "probe", made.file)
    return made


def fault(point: str, kind: Kind, **more: object) -> Fault:
    return Fault.model_validate({"id": "f", "point": point, "kind": kind, **more})


def test_production_has_no_plan() -> None:
    assert faults.plan is None
    assert atomic.probe is None


def test_fault_comes_after_so_many_passages_and_no_more_often_than_planned(plan) -> None:
    plan.arm([fault("producer.land", Kind.DUPLICATE, after=2, times=2)])
    seen = [plan.reach("producer.land") for _ in range(6)]
    assert seen == [None, None, Kind.DUPLICATE, Kind.DUPLICATE, None, None]
    assert plan.reach("producer.take") is None
    assert [f.point for f in plan.fired("f")] == ["producer.land"] * 2


def test_another_process_follows_a_plan_that_was_changed_meanwhile(plan, tmp_path) -> None:
    other = FaultPlan(tmp_path / "faults")
    assert other.reach("gate.open") is None
    plan.arm([fault("gate.*", Kind.DROP)])
    assert other.reach("gate.open") is Kind.DROP
    assert plan.reach("gate.open") is None, "it was used up by the other one"
    plan.arm([])
    assert other.reach("gate.open") is None


def die_at(folder: Path, path: Path) -> None:
    plan = FaultPlan(folder)
    atomic.probe = plan.file
    atomic.write_bytes(path, b"0123456789" * 10, durable=True)


@pytest.mark.parametrize(
    ("kind", "point", "left"), [(Kind.KILL, "chain.write", []), (Kind.TORN, "chain.fsync", [50])]
)
def test_count_survives_the_process_that_was_killed(plan, tmp_path, kind, point, left) -> None:
    (tmp_path / "chain").mkdir()
    plan.arm([fault(point, kind)])
    target = tmp_path / "chain" / "0.json"
    process = SPAWN.Process(target=die_at, args=(tmp_path / "faults", target))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (fired,) = plan.fired("f")
    assert (fired.kind, fired.pid, fired.point) == (kind, process.pid, point)
    assert not target.exists()
    assert [p.stat().st_size for p in (tmp_path / "chain").glob(".*.tmp")] == left
    again = SPAWN.Process(target=die_at, args=(tmp_path / "faults", target))
    again.start()
    again.join(30)
    assert again.exitcode == 0
    assert target.stat().st_size == 100


def test_full_disk_is_told_as_one_and_leaves_nothing(plan, tmp_path) -> None:
    (tmp_path / "control").mkdir()
    plan.arm([fault("control.write", Kind.DISK_FULL)])
    with pytest.raises(DiskFull) as raised:
        atomic.write_json(tmp_path / "control" / "stop.json", {})
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert list((tmp_path / "control").iterdir()) == []
    atomic.write_json(tmp_path / "control" / "stop.json", {})


def test_clock_jumps_and_deadlines_do_not(plan) -> None:
    clock = SystemClock()
    before, at = clock.time(), clock.monotonic()
    plan.arm([fault("clock.time", Kind.CLOCK_JUMP, seconds=-86400.0)])
    assert clock.time() < before - 80000
    assert clock.time() < before - 80000
    assert clock.monotonic() >= at


@pytest.mark.anyio
async def test_what_is_slow_at_an_await_holds_up_its_own_task_alone(plan) -> None:
    plan.arm([fault("session.train", Kind.HANG)])
    others = 0
    with anyio.move_on_after(0.2) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plan.pause, "session.train")
            while True:
                others += 1
                await anyio.sleep(0.001)
    assert scope.cancelled_caught
    assert others > 1


def release_once_held(plan: FaultPlan) -> None:
    while not plan.fired("f"):
        time.sleep(0.005)
    plan.arm([])


def test_what_is_held_goes_on_once_its_fault_is_out_of_the_plan(plan) -> None:
    plan.arm([fault("commit.record", Kind.HOLD)])
    releasing = threading.Thread(target=release_once_held, args=(plan,))
    releasing.start()
    assert plan.reach("commit.record") is None  # would last a day
    releasing.join()
    assert [f.kind for f in plan.fired("f")] == [Kind.HOLD]


@pytest.mark.anyio
async def test_what_is_held_at_an_await_goes_on_for_another_fault_and_after_its_time(plan) -> None:
    plan.arm([fault("session.train", Kind.HOLD)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(plan.pause, "session.train")
        while not plan.fired("f"):  # noqa: ASYNC110 - it is told in a file
            await anyio.sleep(0.005)
        plan.arm([fault("session.train", Kind.HOLD).model_copy(update={"id": "g"})])
    plan.arm([fault("session.train", Kind.HOLD, seconds=0.01).model_copy(update={"id": "h"})])
    await plan.pause("session.train")
    assert [f.id for f in plan.fired()] == ["f", "h"]


def test_names_of_files_say_what_they_are_for() -> None:
    root = Path("/data/run")
    assert file_point("link", root / "chain/7.json") == "chain.link"
    assert file_point("fsync_folder", root / "chain") == "chain.fsync_folder"
    assert file_point("mkdir", root / "checkpoints/.000002-e1.writing") == "commit.mkdir"
    assert file_point("write", root / "ledger/000002-e1.seg") == "ledger.write"
    assert file_point("replace", root / "control/stop.json") == "control.replace"
    assert file_point("replace", root / "workflow.json") == "view.replace"


def test_record_is_read_past_a_torn_line(plan, tmp_path) -> None:
    plan.arm([fault("gate.open", Kind.DROP)])
    plan.reach("gate.open")
    with (tmp_path / "faults" / "fired.jsonl").open("ab") as file:
        file.write(b'{"id": "f", "po')
    (fired,) = plan.fired()
    assert fired.pid == os.getpid()
    assert abs(fired.time - time.time()) < 3600
