"""Stories of several steps land however slow each step is, and end where one never comes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.drill import dealing
from runtime.drill.catalogue import Blow
from runtime.drill.dealing import strike
from runtime.drill.drilled import DrilledRun
from runtime.drill.job import make_job
from runtime.rundir.atomic import write_new
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord, encode
from tests.runtime.drill.actors import SESSION
from tests.runtime.drill.records import chain, epoch

pytestmark = pytest.mark.timeout(240)
REWIND = Blow(name="rewind", how="rewind", role="session", ends_epoch=True)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def run(tmp_path: Path) -> DrilledRun:
    (tmp_path / "made" / "model").mkdir(parents=True)
    job = make_job(tmp_path / "job", tmp_path / "made", "ahead", updates=8)
    job.root.create()
    (record,) = chain(epoch(1))
    write_new(job.root.chain / "0.json", encode(record))
    return DrilledRun(job)


@pytest.fixture
def start(run: DrilledRun) -> Iterator[Start]:
    """Start one of the actors; all are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object) -> subprocess.Popen[bytes]:
        part, *more = map(str, words)
        file = str(run.job.file)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.drill.actors", part, file, *more]
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def committed(run: DrilledRun) -> list[int]:
    return [r.update for r in Chain(run.job.root).read() if isinstance(r, CommitRecord)]


def test_a_session_dies_with_its_evaluation_made_and_its_record_held(
    run: DrilledRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrilledRun, "_attend", lambda _: start("flow", 1, "nowhere"))
    with run:
        # Its command line names an attempt of the run, as the real one's does.
        session = start(SESSION, run.job.root.attempts / "1", 4)
        assert strike(run, REWIND) is not None
        assert session.wait() == -9
    # Update 2 is not evaluated by cadence: its record was let go.
    assert committed(run) == [2]
    assert (run.job.root.evaluations / "e1.u4").is_dir()


def test_without_an_evaluation_nobody_is_killed_and_every_record_is_let_go(
    run: DrilledRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "_STORY_S", 3.0)
    monkeypatch.setattr(DrilledRun, "_attend", lambda _: start("flow", 1, "nowhere"))
    with run:
        session = start(SESSION, run.job.root.attempts / "1")
        assert strike(run, REWIND) is None
        run.until(lambda: committed(run) == [2, 4, 6], "every record")
        assert session.poll() is None


def test_a_signal_waits_for_whom_it_is_to_meet(
    run: DrilledRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine an epoch takes longer to come up than the tries of a card."""
    monkeypatch.setattr(DrilledRun, "_attend", lambda _: start("flow", 1, "nowhere"))
    monkeypatch.setattr(dealing, "_LOOK_S", 0.0)
    looks, late = dealing._victims, list[subprocess.Popen[bytes]]()

    def victims(run: DrilledRun, role: str) -> list[tuple[int, float]]:
        found = looks(run, role)
        if not late:
            late.append(start(SESSION, run.job.root.attempts / "1"))
        return found

    monkeypatch.setattr(dealing, "_victims", victims)
    with run:
        kill = Blow(name="kill session", how="signal", role="session", ends_epoch=True)
        assert strike(run, kill, patience_s=120.0) is not None
        assert late[0].wait() == -9
        nobody = Blow(name="freeze engine", how="freeze", role="engine server")
        assert strike(run, nobody, patience_s=0.2) is None


@pytest.mark.parametrize(("point", "times"), [("attempt.link", 2), ("launch.claim", 1)])
def test_two_flows_are_held_until_both_have_come(
    run: DrilledRun, start: Start, monkeypatch: pytest.MonkeyPatch, point: str, times: int
) -> None:
    session = start(SESSION, run.job.root.attempts / "1")
    monkeypatch.setattr(DrilledRun, "_attend", lambda _: start("flow", session.pid, point))
    blow = Blow(name="two flows", how="two flows", role="session", point=point, times=times)
    with run:
        landed = strike(run, blow)
        assert landed is not None
        assert [fired.point for fired in run.plan.fired()].count(point) == times
    assert (run.job.root.path / "claimed").is_dir()


def test_a_flow_that_never_comes_to_the_point_leaves_the_other_free(
    run: DrilledRun, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "_STORY_S", 5.0)
    session = start(SESSION, run.job.root.attempts / "1")
    points = iter(["attempt.link", "elsewhere"])
    monkeypatch.setattr(DrilledRun, "_attend", lambda _: start("flow", session.pid, next(points)))
    blow = Blow(name="two flows", how="two flows", role="session", point="attempt.link", times=2)
    with run:
        assert strike(run, blow) is None
        assert run.plan.reach("attempt.link") is None
