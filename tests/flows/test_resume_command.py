"""`resume`, `watch`, `report`: what is started, what is left alone, and how following ends."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.run import RunSpec
from flows.cli import build_app
from flows.commands._following import follow
from runtime.launch import resume as resuming
from runtime.launch.local import LocalLaunch
from runtime.rundir.attempt import AttemptFile
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.session.status import Status
from tests.flows.made_run import MadeRun, dead

GONE = (sys.executable, "-c", "pass")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    # A guard that does nothing: what is started is read from the attempt's files.
    monkeypatch.setattr("runtime.launch.start.LocalLaunch", partial(LocalLaunch, guard=GONE))
    return MadeRun(tmp_path)


def milepost(*arguments: str) -> tuple[int, dict]:
    given = [*arguments, "--json"]
    done = CliRunner().invoke(build_app(given), given)
    return done.exit_code, json.loads(done.stdout)


def resume(made: MadeRun, *more: str) -> tuple[int, dict]:
    return milepost("resume", str(made.root.path), *more)


@pytest.mark.parametrize(
    ("state", "activity", "failure"),
    [("training", "stopped", None), ("training", "parked", None), ("failed", None, dead())],
)
def test_a_run_that_stands_still_gets_its_next_attempt(
    made: MadeRun, state: str, activity: str | None, failure
) -> None:
    made.begin()
    made.end(state, 0, activity=activity, failure=failure)
    code, answer = resume(made, "--detach")
    assert (code, answer["how"], answer["attempt"]) == (0, "started", 2)
    attempt = made.root.attempt(2)
    assert AttemptFile.read(attempt).reason == "resume"
    frozen = RunSpec.model_validate_json(attempt.run.read_bytes())
    assert frozen.launch.is_detached
    assert frozen.core == made.loaded.spec.core


def test_two_who_resume_at_once_make_one_attempt_however_soon_it_ends(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    look, rivals = resuming.look, list[tuple[int, dict]]()

    def late(root: RunRoot) -> Status:
        seen = look(root)
        monkeypatch.setattr(resuming, "look", look)
        rivals.append(resume(made, "--detach"))
        made.begin()
        made.end("training", 0, activity="stopped", ended_by="stop")
        return seen

    monkeypatch.setattr(resuming, "look", late)
    ours = resume(made, "--detach")
    assert [(code, answer["how"], answer["attempt"]) for code, answer in (*rivals, ours)] == [
        (0, "started", 2),
        (0, "attached", 2),
    ]
    assert made.root.attempt_numbers() == [1, 2]


def test_the_run_file_may_bring_more_updates(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    code, answer = milepost("resume", str(made.file), "--set", "core.max_updates = 8", "--detach")
    assert (code, answer["how"]) == (0, "started")
    frozen = RunSpec.model_validate_json(made.root.attempt(2).run.read_bytes())
    assert frozen.core.max_updates == 8


def test_another_training_is_refused_and_nothing_started(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.end("training", 0, activity="stopped")
    code, answer = milepost("resume", str(made.file), "--set", "core.lr = 9.0", "--detach")
    assert (code, answer["error"]) == (1, "ConfigError")
    assert "core.lr" in answer["message"]
    assert made.root.attempt_numbers() == [1]


def test_an_owner_that_is_gone_is_succeeded(made: MadeRun) -> None:
    made.begin(pid=2**22 + 1)
    made.view()
    assert resume(made, "--detach")[1]["how"] == "started"


def test_a_held_step_gets_one_more_try(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    failure = dead()
    made.view(activity="held", failure=failure)
    code, answer = resume(made)
    assert (code, answer["how"], answer["failure_id"]) == (0, "retried", failure.id)
    assert Control(made.root).take_retry(failure.id)
    assert made.root.attempt_numbers() == [1]


def test_a_running_run_needs_nothing(made: MadeRun) -> None:
    made.begin()
    made.view()
    code, answer = resume(made)
    assert (code, answer["how"]) == (0, "running")


def test_a_complete_run_starts_nothing(made: MadeRun) -> None:
    made.run_to(4)
    code, answer = resume(made)
    assert (code, answer["how"]) == (0, "complete")
    assert made.root.attempt_numbers() == [1]


def test_a_root_that_was_moved_is_refused(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    moved = made.root.path.rename(made.root.path.with_name("moved"))
    code, answer = milepost("resume", str(moved), "--detach")
    assert (code, answer["error"]) == (1, "ConfigError")
    assert "moved" in answer["message"]


def test_a_frozen_file_that_is_damaged_asks_for_the_toml(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    made.root.run.write_text("{")
    code, answer = resume(made, "--detach")
    assert (code, answer["error"]) == (1, "StoreError")
    assert milepost("resume", str(made.file), "--detach")[0] == 0


def test_following_ends_with_the_status_of_an_attempt_that_died(made: MadeRun) -> None:
    made.begin()
    made.end("training", 0, activity="stopped")
    code, answer = resume(made)
    assert (code, answer["attempt"], answer["stale"]) == (6, 2, True)


# -- watch ---------------------------------------------------------------------------------------


def test_a_line_per_change_until_the_end(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.view(update=1)
    told: list[str] = []
    story = iter(
        [
            lambda: made.view(update=1, count=2),
            lambda: made.view(update=2, detail={"reward_mean": 0.5}),
            lambda: made.view(update=2, activity="held", failure=dead()),
            lambda: made.end("training", 2, activity="stopped", ended_by="stop"),
        ]
    )
    assert follow(made.root, told.append, sleep=lambda _: next(story)())
    assert ["update 1/4" in told[0], "reward_mean 0.5" in told[1]] == [True, True]
    assert "held in segment/3: engine 2 died" in told[2]
    assert len(told) == 4


def test_watching_counts_as_being_attached_and_status_does_not(made: MadeRun) -> None:
    made.begin()
    made.view()
    milepost("status", str(made.root.path))
    assert Control(made.root).attached() is None
    milepost("watch", str(made.root.path), "--timeout", "0")
    assert Control(made.root).attached() is not None


@pytest.mark.parametrize(("state", "code"), [("complete", 0), ("failed", 4)])
def test_watch_ends_with_the_code_of_status(made: MadeRun, state: str, code: int) -> None:
    made.run_to(4, state=state, failure=dead() if state == "failed" else None)
    found, answer = milepost("watch", str(made.root.path))
    assert (found, answer["state"]) == (code, state)


def test_watch_of_a_lost_run_is_6(made: MadeRun) -> None:
    made.begin(pid=2**22 + 1)
    made.view()
    assert milepost("watch", str(made.root.path))[0] == 6


# -- report --------------------------------------------------------------------------------------


def test_report_writes_one_page_and_says_where(made: MadeRun) -> None:
    made.run_to(4)
    code, answer = milepost("report", str(made.root.path))
    path = Path(answer["report"])
    assert (code, path) == (0, made.root.reports / "report.html")
    assert "made" in path.read_text()
