"""What is left in a scheduler's results folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.results import LEFT_OUT, keep


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    root = RunRoot(tmp_path / "run")
    root.create()
    attempt = root.attempt(2)
    attempt.path.mkdir()
    attempt.run.write_text("{}")
    attempt.session_log.write_text("".join(f"line {n:03}\n" for n in range(100)))
    (attempt.path / "engine-0.log").write_text("up\n")
    (attempt.path / "trainer-0.jsonl").write_text('{"event":"x"}\n')
    root.workflow.write_text("{}")
    root.reports.mkdir()
    (root.reports / "run.html").write_text("<html>" + "x" * 500)
    root.checkpoint(5, 1).mkdir(parents=True)
    (root.checkpoint(5, 1) / "weights.log").write_text("not for here")
    return attempt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "output"
    made.mkdir()
    return made


def test_logs_run_file_and_reports_are_kept_and_nothing_else(
    attempt: AttemptDir, folder: Path
) -> None:
    assert keep(attempt, folder) == [
        "logs/engine-0.log", "logs/trainer-0.jsonl", "reports/run.html", "run.log",
        "submitted-run.json", "workflow.json",
    ]  # fmt: skip
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there == set(keep(attempt, folder))
    assert (folder / "run.log").read_text() == attempt.session_log.read_text()


@pytest.mark.parametrize("most", [89, 90, 91, 98])
def test_of_a_long_log_the_last_whole_lines_are_kept(
    attempt: AttemptDir, folder: Path, most: int
) -> None:
    kept = keep(attempt, folder, most_bytes=most)
    lines = (folder / "run.log").read_text().splitlines()
    assert lines == [f"line {n:03}" for n in range(100 - most // 9, 100)]
    # A report has no end that could stand for it.
    assert "reports/run.html" not in kept
    assert "run.html: larger than" in (folder / LEFT_OUT).read_text()


def test_what_cannot_be_copied_is_named_and_stops_nothing(
    attempt: AttemptDir, folder: Path
) -> None:
    (folder / "reports").write_text("in the way")
    kept = keep(attempt, folder)
    assert {"run.log", LEFT_OUT} <= set(kept)
    assert "run.html" in (folder / LEFT_OUT).read_text()


def test_a_folder_that_no_scheduler_made_is_not_made(attempt: AttemptDir, tmp_path: Path) -> None:
    assert keep(attempt, tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()
