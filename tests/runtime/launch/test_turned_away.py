"""What follows an attempt that another owner of the run turned away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import LoadedRun, load_run
from runtime.clock import ManualClock
from runtime.errors import ContractViolation, Interrupted, OwnedError
from runtime.launch import driving
from runtime.launch.driving import News, ending
from runtime.launch.ray_jobs import RayJobs, classify
from runtime.launch.receipts import Receipts
from runtime.launch.standing import AttemptClass, AttemptStanding, RankStanding, of_ranks
from runtime.launch.submitting import Sender
from runtime.launch.telling import told
from runtime.launch.watching import (
    MOST_TURNED_AWAY,
    Decision,
    Owner,
    Watcher,
    decide,
    decide_turned_away,
)
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord
from runtime.session.ends import End, EndedBy
from tests.runtime.launch.owned_runs import end, ended, own
from tests.runtime.launch.submissions import PRESETS


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    return RunRoot.of(tmp_path / "run")


EXIT_3 = {"status": "FAILED", "driver_exit_code": 3, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}


def turned_away(root: RunRoot, attempt: int) -> AttemptStanding:
    return told(classify(EXIT_3), Chain(root).read(), attempt)


def watcher(root: RunRoot, tmp_path: Path, auto_resume: str = "milepost") -> Watcher:
    loaded: LoadedRun = load_run(
        PRESETS / "laptop.toml",
        [
            'launch.backend="ray"',
            f'output.root="{root.path}"',
            f"launch.weka_mounts={json.dumps([str(tmp_path)])}",
            f'launch.auto_resume="{auto_resume}"',
        ],
    )
    receipts = Receipts(tmp_path / "receipts")
    return Watcher(
        loaded, Sender(backend=RayJobs("http://nobody"), receipts=receipts, clock=ManualClock())
    )


ENDS = [
    *((ended("complete" if End(by=by).is_complete else "training", by), by) for by in EndedBy),
    (ended("training", "stop_now"), "stop_now"),
    (ended("failed", "failure", Interrupted("a node is gone")), "failure of its hardware"),
    (ended("failed", "failure", ContractViolation("the digest differs")), "failure"),
]
GOES_ON = {by for by in EndedBy if End(by=by).is_complete}
GOES_ON |= {EndedBy.SIGTERM, "failure of its hardware"}


@pytest.mark.parametrize(("last", "how"), ENDS, ids=[how for _, how in ENDS])
def test_how_the_owner_ended_decides(
    root: RunRoot, tmp_path: Path, last: EndRecord, how: str
) -> None:
    own(root, attempt=1)
    watching = watcher(root, tmp_path)
    assert watching.decide(2, turned_away(root, 2)).what == "wait"
    end(root, last)
    decision = watching.decide(2, turned_away(root, 2))
    assert decision.what == ("again" if how in GOES_ON else "over")
    assert "attempt 1 (epoch 1" in decision.why


@pytest.mark.parametrize("auto_resume", ["off", "scheduler"])
def test_without_resubmission_the_error_says_another_owner(
    root: RunRoot, tmp_path: Path, auto_resume: str
) -> None:
    own(root, attempt=1)
    standing = turned_away(root, 2)
    decision = watcher(root, tmp_path, auto_resume).decide(2, standing)
    assert decision.what == "over"
    error = ending(2, standing, decision)
    assert isinstance(error, OwnedError)
    assert "another process owned the run: attempt 1 (epoch 1, pid 7 on elsewhere)" in error.message


def test_who_was_fenced_by_a_newer_attempt_was_turned_away(root: RunRoot) -> None:
    own(root, attempt=1)
    own(root, attempt=2, epoch=2)
    assert turned_away(root, 1).is_turned_away
    assert "attempt 2" in turned_away(root, 1).reason


def test_only_its_own_exit_status_says_so(root: RunRoot) -> None:
    own(root, attempt=1)
    for code in (0, 1, 2, 4, 75):
        standing = told(classify({**EXIT_3, "driver_exit_code": code}), Chain(root).read(), 2)
        assert (standing.kind, standing.is_turned_away) == (AttemptClass.FAILED, False)
    live = AttemptStanding(kind=AttemptClass.RUNNING, raw="x", exit_code=3)
    assert told(live, Chain(root).read(), 2) == live


def test_whoever_waits_for_an_owner_is_told_of_it_once(root: RunRoot, tmp_path: Path) -> None:
    own(root, attempt=1)
    watching = watcher(root, tmp_path)
    watching.look = lambda attempt: turned_away(root, attempt)
    said: list[str] = []
    looks = iter(range(4))

    def sleep(seconds: float) -> None:
        if next(looks) == 3:
            end(root, ended("training", "sigterm"))

    _, decision = driving._over(watching, 2, said.append, sleep)
    assert decision.what == "again"
    owner = "attempt 1 (epoch 1, pid 7 on elsewhere) has the run"
    waits = [line for line in said if "waits" in line]
    assert waits == [f"attempt 2 waits: {owner}; `milepost stop` ends it"]


def test_what_is_waited_for_is_said_when_it_changes() -> None:
    runs = AttemptStanding(kind=AttemptClass.RUNNING, raw="x")
    news = News(2)
    assert news.of(runs, Decision(what="wait")) == ["attempt 2: running (x) "]
    assert news.of(runs, Decision(what="wait")) == []
    for why in ("rank 1", "rank 2"):
        assert news.of(runs, Decision(what="wait", why=why)) == [f"attempt 2 waits: {why}"]
        assert news.of(runs, Decision(what="wait", why=why)) == []
    assert news.of(runs, Decision(what="again", why="rank 3")) == []


def test_being_turned_away_again_and_again_comes_to_an_end() -> None:
    unknown = Owner(state="unknown", what="cannot be seen")

    def after(in_a_row: int, owner: Owner = unknown, attempt: int = 9) -> Decision:
        return decide_turned_away(
            AttemptStanding(kind=AttemptClass.STOPPED, raw="x"),
            owner,
            auto_resume="milepost",
            in_a_row=in_a_row,
            attempt=attempt,
        )

    delays = [after(n).delay_s for n in range(1, MOST_TURNED_AWAY)]
    assert delays == [10.0, 20.0, 40.0, 80.0]
    assert after(MOST_TURNED_AWAY).what == "over"
    assert after(1, attempt=100).what == "over"
    # While an owner is there it is waited for, however often one was sent before.
    assert after(MOST_TURNED_AWAY, replace(unknown, state="alive")).what == "wait"


def test_nobody_follows_while_another_replica_still_runs(root: RunRoot, tmp_path: Path) -> None:
    own(root, attempt=1)
    end(root, ended("training", "sigterm"))
    leader = RankStanding(rank=0, kind=AttemptClass.FAILED, raw="failed (exit 3)", exit_code=3)
    for kind, what in ((AttemptClass.RUNNING, "wait"), (AttemptClass.INTERRUPTED, "again")):
        other = RankStanding(rank=1, kind=kind, raw="x", is_secondary=True)
        standing = told(of_ranks([leader, other]), Chain(root).read(), 2)
        assert standing.is_turned_away
        assert watcher(root, tmp_path).decide(2, standing).what == what


def test_a_newer_owner_that_is_gone_is_lost_with_the_one_it_fenced(
    root: RunRoot, tmp_path: Path
) -> None:
    own(root, attempt=1)
    own(root, attempt=2, epoch=2)
    end(root, ended("training", "sigterm", epoch=2))
    decision = watcher(root, tmp_path).decide(1, turned_away(root, 1))
    assert (decision.what, decision.lost_attempt) == ("again", 2)


def test_attempts_turned_away_are_not_attempts_without_a_commit() -> None:
    lost = AttemptStanding(kind=AttemptClass.PREEMPTED, raw="x")
    asked = {"attempt": 6, "auto_resume": "milepost", "last_committing": 0}
    assert decide(lost, **asked).what == "over"
    assert decide(lost, turned_away=2, **asked).what == "again"
