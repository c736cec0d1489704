"""`ledger`: counts over committed history, whatever the view or a dead session say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import build_app
from tests.flows.made_run import MadeRun


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def ledger(made: MadeRun, *more: str) -> tuple[int, dict]:
    arguments = ["ledger", str(made.root.path), "--json", *more]
    done = CliRunner().invoke(build_app(arguments), arguments)
    return done.exit_code, json.loads(done.stdout)


def test_every_prompt_is_in_one_state(made: MadeRun) -> None:
    made.run_to(4)
    code, answer = ledger(made)
    assert code == 0
    assert answer == {
        "consumed": 8,
        "filtered": 0,
        "dropped": 0,
        "skipped": 0,
        "pending": 0,
        "remaining": 8,
        "requeued": 0,
        "lost": 0,
        "doubled": 0,
        "digest": made.ledger.digest,
    }


def test_prompts_are_listed_with_the_update_that_used_them(made: MadeRun) -> None:
    made.run_to(4)
    _, answer = ledger(made, "--prompts")
    assert [row["update"] for row in answer["prompts"]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len({row["prompt"] for row in answer["prompts"]}) == 8


def test_what_was_not_committed_does_not_count(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    made.train(1)
    assert ledger(made)[1]["consumed"] == 0
    made.commit(1)
    assert ledger(made)[1]["consumed"] == 2


def test_the_four_ends_and_requeues_are_told_apart(made: MadeRun) -> None:
    made.begin()
    made.commit(0)
    ends = (made.ledger.filter, made.ledger.drop, made.ledger.skip)
    for end in ends:
        group = made.ledger.admit()
        end(group.prompt_id, group.attempt)
    again = made.ledger.admit()
    made.ledger.requeue(again.prompt_id, again.attempt, "engine died")
    made.commit(1)
    code, answer = ledger(made)
    assert code == 0
    names = ("filtered", "dropped", "skipped", "pending", "remaining", "requeued", "lost")
    assert {name: answer[name] for name in names} == {
        "filtered": 1,
        "dropped": 1,
        "skipped": 1,
        "pending": 1,
        "remaining": 12,
        "requeued": 1,
        "lost": 0,
    }


def test_history_that_cannot_be_read_is_1_and_named(made: MadeRun) -> None:
    made.run_to(4)
    damaged = made.root.path / "ledger" / "000002-e1.seg"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    code, answer = ledger(made)
    assert code == 1
    assert "ledger segment" in answer["error"]
    damaged.unlink()
    assert "000002-e1.seg" in ledger(made)[1]["error"]


def test_a_segment_of_another_commit_is_refused(made: MadeRun) -> None:
    made.run_to(4)
    folder = made.root.path / "ledger"
    (folder / "000002-e1.seg").write_bytes((folder / "000004-e1.seg").read_bytes())
    assert ledger(made)[0] == 1


def test_before_commit_0_nothing_is_known(made: MadeRun) -> None:
    made.begin()
    assert ledger(made)[0] == 6
