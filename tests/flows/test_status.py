"""What `status` says in every state of a run directory, and what keeps it from `complete`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from runtime.clock import ManualClock
from runtime.policy import PolicyId
from runtime.rundir.attempt import TurnedAway
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot, ProcessRegistry
from runtime.session.status import look
from tests.flows.made_run import MadeRun, dead

HEAVY = ("prefect", "ray", "torch", "transformers", "numpy", "pyarrow", "rich", "plotly", "wandb")
ELSEWHERE = HostBoot("elsewhere", "boot")


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def milepost(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(Path.cwd())},
    )


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- complete ------------------------------------------------------------------------------------


def test_a_complete_run_with_every_row_filled_is_0(made: MadeRun) -> None:
    made.run_to(4)
    status = look(made.root)
    assert (status.state, status.activity, status.outstanding) == ("complete", None, ())
    assert [row.name for row in status.rows if not row.is_filled] == []
    assert status.expected == status.seen
    assert (status.update, status.last_checkpoint, status.exit_code) == (4, 4, 0)


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("prepared/receipt.json", "prepared"),
        ("rollouts/000003-e1.parquet", "rollouts/000003"),
        ("contracts", "contracts"),
        ("driver_timing.jsonl", "driver_timing.jsonl"),
        ("wandb/run.json", "wandb"),
        ("evaluations/e1.u4", "evaluation/4/holdout"),
        ("publications.jsonl", "weights, engines"),
        ("attempts/1/claim.json", "launch receipt"),
    ],
)
def test_each_missing_proof_keeps_it_from_complete(made: MadeRun, gone: str, named: str) -> None:
    made.run_to(4)
    remove(made.root.path / gone)
    status = look(made.root)
    assert status.outstanding == (named,)
    assert (status.state, status.exit_code) == ("complete", 5)
    assert named in str(status.next_check)


def test_a_file_that_was_cut_off_proves_nothing(made: MadeRun) -> None:
    made.run_to(4)
    (made.root.rollouts / "000002-e1.parquet").write_bytes(b"PAR1 coll")
    assert look(made.root).outstanding == ("rollouts/000002",)
    (made.root.rollouts / "000002-e1.parquet").write_bytes(b"")
    assert look(made.root).outstanding == ("rollouts/000002",)


def test_an_evaluation_off_the_final_one_is_counted_and_not_required(made: MadeRun) -> None:
    made.run_to(4)
    remove(made.root.evaluations / "e1.u2")
    status = look(made.root)
    assert (status.expected.evaluations, status.seen.evaluations) == (2, 1)
    assert status.exit_code == 0


def test_a_result_that_comes_later_makes_it_complete(made: MadeRun) -> None:
    made.run_to(4)
    remove(made.root.evaluations / "e1.u4")
    made.evaluate(4, state="skipped")
    assert look(made.root).outstanding == ("evaluation/4/holdout",)
    remove(made.root.evaluations / "e1.u4")
    made.evaluate(4)
    assert look(made.root).exit_code == 0


def test_a_publication_of_an_older_policy_is_not_the_last_one(made: MadeRun) -> None:
    made.run_to(4)
    made.publish(3)
    assert look(made.root).outstanding == ("publication/4",)


def test_a_run_that_ended_early_owes_what_its_actual_end_brings(made: MadeRun) -> None:
    made.run_to(3, ended_by="wall_clock")
    status = look(made.root)
    assert status.expected.model_dump() == {
        "updates": 3,
        "checkpoints": 2,
        "evaluations": 2,
        "exports": 0,
    }
    assert (status.exit_code, status.ended_by) == (0, "wall_clock")


def test_a_process_that_is_left_keeps_its_row_empty(made: MadeRun) -> None:
    made.run_to(4)
    ProcessRegistry(made.root.attempt(1).processes).enter("engine", os.getpid(), 1)
    status = look(made.root)
    assert [row.name for row in status.rows if not row.is_filled] == ["exits"]
    assert status.exit_code == 5


def test_a_guard_that_wrote_the_end_and_is_about_to_leave_is_no_leftover(made: MadeRun) -> None:
    made.run_to(4)
    ProcessRegistry(made.root.attempt(1).processes).enter("guard", os.getpid(), 1)
    assert look(made.root).exit_code == 0


@settings(max_examples=30)
@given(data=st.data())
def test_complete_means_that_no_row_is_empty(tmp_path_factory, data) -> None:
    made = MadeRun(tmp_path_factory.mktemp("run"))
    made.run_to(4)
    files = [p for p in made.root.path.rglob("*") if p.is_file() and "chain" not in p.parts]
    for path in data.draw(st.lists(st.sampled_from(files), unique=True, max_size=3)):
        path.unlink() if data.draw(st.booleans()) else path.write_bytes(b"")
    status = look(made.root)
    is_whole = all(row.is_filled for row in status.rows)
    assert (status.exit_code == 0) == is_whole == (not status.outstanding)


# -- other states --------------------------------------------------------------------------------


def test_a_live_session_is_3(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.view(update=1)
    status = look(made.root)
    assert (status.state, status.activity, status.update) == ("training", "running", 1)
    assert (status.stale, status.exit_code) == (None, 3)
    assert not any(row.is_filled for row in status.rows if row.name in ("exits", "state"))


def test_a_claimed_attempt_is_3_before_it_owns_the_run(made: MadeRun) -> None:
    made.claim(1)
    status = look(made.root)
    assert (status.run, status.state, status.attempt) == ("made", "preparing", 1)
    assert status.exit_code == 3


def test_a_stopped_run_that_is_being_resumed_is_3(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.end("training", 0, activity="stopped")
    assert look(made.root).exit_code == 7
    made.claim(2)
    status = look(made.root)
    assert (status.activity, status.attempt, status.exit_code) == ("resuming", 2, 3)


def test_an_attempt_that_died_before_it_owned_the_run_is_6(made: MadeRun) -> None:
    made.claim(1)
    path = made.root.attempt(1).claim
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 1}))
    status = look(made.root)
    assert status.exit_code == 6
    assert "guard.log" in str(status.stale)


def test_an_attempt_that_was_turned_away_is_not_the_runs(made: MadeRun) -> None:
    """Somebody took the owner for lost, and it was not."""
    made.begin()
    made.commit(0)
    made.view(update=1)
    made.claim(2)
    mark = TurnedAway(pid=7, host="elsewhere", reason="owned", time=0.0)
    made.root.attempt(2).turned_away.write_bytes(mark.encode())
    status = look(made.root)
    assert (status.activity, status.attempt) == ("running", 1)
    assert (status.stale, status.exit_code) == (None, 3)


@pytest.mark.parametrize("activity", ["stopped", "parked"])
def test_a_run_that_can_be_resumed_is_7(made: MadeRun, activity: str) -> None:
    made.begin()
    made.commit(0)
    made.end("training", 0, activity=activity)
    status = look(made.root)
    assert (status.state, status.activity, status.exit_code) == ("training", activity, 7)


def test_a_held_step_is_7_with_its_failure(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.view(activity="held", failure=dead())
    status = look(made.root)
    assert (status.activity, status.exit_code) == ("held", 7)
    assert status.failure == dead().model_copy(update={"id": status.failure.id})
    assert status.next_check == status.failure.next_check


def test_a_failed_run_is_4_with_its_next_check(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    failure = dead()
    made.end("failed", 3, failure=failure)
    status = look(made.root)
    assert (status.state, status.exit_code, status.failure) == ("failed", 4, failure)
    assert status.next_check == failure.next_check


def test_a_guard_that_is_gone_is_6_at_once(made: MadeRun) -> None:
    made.begin(pid=2**22 + 1)
    made.commit(0)
    made.view()
    status = look(made.root, sleep=pytest.fail)
    assert (status.state, status.exit_code) == ("training", 6)
    assert "is gone" in str(status.stale)


def test_a_held_run_whose_guard_is_gone_is_stale_and_not_held(made: MadeRun) -> None:
    made.begin(pid=2**22 + 1)
    made.view(activity="held", failure=dead())
    assert look(made.root).exit_code == 6


class Elsewhere:
    """A session on another host, seen between sleeps: beats for a while, or never."""

    def __init__(self, made: MadeRun, beats: bool) -> None:
        self.made, self.beats = made, beats
        self.clock = ManualClock()

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.beats and self.clock.time() > 1002.0:
            self.made.view(beat_at=5.0, count=2)


@pytest.mark.parametrize(("beats", "code"), [(True, 3), (False, 6)])
def test_life_on_another_host_shows_by_change_alone(made: MadeRun, beats: bool, code: int) -> None:
    made.begin(here=ELSEWHERE)
    made.commit(0)
    made.view(beat_at=5.0)
    world = Elsewhere(made, beats)
    status = look(made.root, clock=world.clock, sleep=world.sleep)
    assert status.exit_code == code
    assert world.clock.time() <= 1011


@pytest.mark.parametrize(("age_s", "code"), [(3.0, 3), (60.0, 6)])
def test_a_live_guard_with_a_silent_session_is_stale(
    made: MadeRun, age_s: float, code: int
) -> None:
    clock = ManualClock()
    made.begin()
    made.view(beat_at=clock.time() - age_s)
    assert look(made.root, clock=clock, sleep=clock.advance).exit_code == code


def test_nothing_is_unknown(tmp_path: Path) -> None:
    status = look(RunRoot.of(tmp_path / "nothing"))
    assert (status.state, status.exit_code) == ("unknown", 6)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 99}', None])
def test_a_damaged_view_changes_no_answer(made: MadeRun, damage: bytes | None) -> None:
    made.run_to(4)
    before = look(made.root)
    if damage is None:
        made.root.workflow.unlink()
    else:
        made.root.workflow.write_bytes(damage)
    after = look(made.root)
    assert (after.state, after.exit_code, after.seen) == (before.state, 0, before.seen)
    assert (after.run, after.expected) == ("made", before.expected)
    (state,) = [row for row in after.rows if row.name == "state"]
    assert "damaged" in state.found


def test_what_a_rewind_undid_counts_for_nothing(made: MadeRun) -> None:
    made.begin()
    first = made.commit(0)
    made.train(1)
    made.train(2)
    made.commit(2)
    made.evaluate(2)
    made.begin(restored=first)
    status = look(made.root)
    assert (status.last_checkpoint, status.seen.checkpoints, status.seen.evaluations) == (0, 0, 0)


# -- the command ---------------------------------------------------------------------------------


def test_the_command_answers_with_one_object(made: MadeRun, tmp_path: Path) -> None:
    made.run_to(4)
    by_root, by_name, by_file = (
        milepost("status", text, "--json", cwd=tmp_path)
        for text in (str(made.root.path), "made", "made.toml")
    )
    assert [done.returncode for done in (by_root, by_name, by_file)] == [0, 0, 0]
    answer = json.loads(by_root.stdout)
    assert answer | {"next_command": ""} == json.loads(by_name.stdout) | {"next_command": ""}
    assert {
        key: answer[key]
        for key in ("run", "state", "activity", "stale", "attempt", "epoch", "update")
    } == {
        "run": "made",
        "state": "complete",
        "activity": None,
        "stale": False,
        "attempt": 1,
        "epoch": 1,
        "update": 4,
    }
    counts = {"updates": 4, "checkpoints": 2, "evaluations": 2, "exports": 0}
    assert answer["expected"] == answer["seen"] == counts
    assert (answer["outstanding"], answer["last_checkpoint"]) == ([], 4)
    assert (answer["failure"], answer["next_check"]) == (None, None)


def test_a_person_reads_rows_and_what_to_type(made: MadeRun, tmp_path: Path) -> None:
    made.run_to(4)
    remove(made.root.driver_timing)
    done = milepost("status", "runs/made", cwd=tmp_path)
    assert done.returncode == 5
    assert "--  audit files" in done.stdout
    assert "ok  counts" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1] == f"next: milepost report {made.root.path}"


def test_a_name_in_another_folder_is_found(made: MadeRun, tmp_path: Path, monkeypatch) -> None:
    made.begin()
    monkeypatch.setenv("MILEPOST_RUNS", str(made.root.path.parent))
    done = milepost("status", "made", "--json", cwd=tmp_path.parent)
    assert json.loads(done.stdout)["root"] == str(made.root.path)


def test_a_run_is_found_by_its_name_where_the_folder_has_another(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, name="apple", root="runs/pear")
    made.claim(1)
    done = milepost("status", "apple", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["root"] == str(made.root.path)


@pytest.mark.parametrize("text", ["absent", "runs/absent", "absent.toml"])
def test_a_run_that_is_not_there_is_wrong_usage(tmp_path: Path, text: str) -> None:
    done = milepost("status", text, "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert text in json.loads(done.stdout)["error"]


def test_damaged_history_is_unknown_and_named(made: MadeRun, tmp_path: Path) -> None:
    made.begin()
    (made.root.chain / "0.json").write_text("{")
    done = milepost("status", "runs/made", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["state"], answer["stale"]) == (6, "unknown", True)
    assert "0.json" in answer["next_check"]


def test_a_root_that_cannot_be_read_says_so_row_by_row(made: MadeRun, monkeypatch) -> None:
    from flows.commands._standing import lines, standing

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(made.root.chain))

    monkeypatch.setattr("flows.commands._standing.look", refuse)
    status = standing(made.root)
    assert (status.state, status.exit_code) == ("unknown", 6)
    shown = "\n".join(lines(status, "made"))
    assert shown.count("cannot be read from this host") == len(status.rows)


def test_status_loads_nothing_heavy(made: MadeRun) -> None:
    made.run_to(4)
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n"
        f"    main(['status', {str(made.root.path)!r}, '--json'])\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.stderr.write(repr((code, loaded)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == "(0, [])"


def test_policy_ids_of_other_epochs_do_not_stand_in(made: MadeRun) -> None:
    made.run_to(4)
    newest = made.root.evaluations / "e1.u4"
    newest.rename(made.root.evaluations / str(PolicyId(7, 4)))
    assert look(made.root).outstanding == ("evaluation/4/holdout",)
