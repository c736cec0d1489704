"""Every promise is found broken where it is, by what the run wrote down; planted one at a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.checkpoints.resume import NoValidCommit
from runtime.drill.job import Job, make_job
from runtime.drill.promises import broken, unevaluated
from runtime.rundir.failure import Failure
from runtime.rundir.records import EndRecord, Record
from tests.runtime.drill.records import chain, commit, epoch

FIRST, TWO = chain(epoch(1), commit(1, 2))
HISTORY = chain(FIRST, TWO, epoch(2, TWO), commit(2, 4), commit(2, 8))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "made" / "model").mkdir(parents=True)
    job = make_job(tmp_path / "job", tmp_path / "made", "ahead", updates=8)
    job.root.create()
    return job


def append(path: Path, *rows: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def evaluated(job: Job, *policies: str, state: str = "succeeded") -> None:
    for policy in policies:
        append(job.root.evaluations / policy / "held" / "tries" / "1" / "result.json",
               {"state": state})  # fmt: skip


def failed(number: int, error: Exception) -> EndRecord:
    failure = Failure.of(error, step="rendezvous", time=0.0)
    return EndRecord(
        epoch=number, time=0.0, state="failed", ended_by="failure", update=0, failure=failure
    )


def test_a_run_as_it_should_be_breaks_nothing(job: Job) -> None:
    append(job.attended,
           {"saw": "started", "attempt": 1, "pid": 7}, {"saw": "attached", "attempt": 1, "pid": 8},
           {"saw": "started", "attempt": 2, "pid": 8})  # fmt: skip
    append(job.root.journal,
           {"event": "epoch.taken", "epoch": 1, "attempt": 1},
           {"event": "epoch.taken", "epoch": 2, "attempt": 2})  # fmt: skip
    append(job.root.attempt(1).session_log, {"event": "group.requeued", "prompt": "0:1"})
    evaluated(job, "e1.u4", "e2.u4", "e2.u8")
    assert broken(job, HISTORY) == []
    assert list(unevaluated(job, HISTORY)) == []


@pytest.mark.parametrize(
    "last",
    [
        epoch(2, reason="resume: epoch 1 vanished; checkpoints/000002-e1: 3 bytes"),
        failed(1, NoValidCommit("checkpoints/000000-e1: initial.json is torn")),
    ],
)
def test_a_commit_that_an_epoch_found_damaged(job: Job, last: Record) -> None:
    (problem,) = broken(job, chain(FIRST, TWO, last))
    assert problem.startswith(f"epoch {last.epoch} found a damaged commit: ")
    assert (
        broken(job, chain(FIRST, TWO, failed(1, ValueError("checkpoints/ were not meant")))) == []
    )


def test_an_attempt_that_two_flows_started(job: Job) -> None:
    append(job.attended, *({"saw": "started", "attempt": 3, "pid": pid} for pid in (7, 8)))
    assert broken(job, HISTORY) == ["attempt 3 was claimed and started by 2 flows, not by one"]


def test_a_lost_attempt_that_two_flows_succeeded(job: Job) -> None:
    def started(attempt: int, pid: int, after: int | None) -> dict[str, object]:
        return {"saw": "started", "attempt": attempt, "pid": pid, "after": after}

    append(job.attended, started(2, 7, 1), started(3, 7, 1), started(4, 8, None))
    assert broken(job, HISTORY) == [], "one flow may try again: its attempt was over"
    append(job.attended, started(5, 7, 4), started(6, 8, 4))
    assert broken(job, HISTORY) == ["attempt 4 was succeeded by 5 and 6, each of another flow"]


def test_an_epoch_that_two_guards_took(job: Job) -> None:
    append(job.root.journal, *({"event": "epoch.taken", "epoch": 2, "attempt": a} for a in (2, 3)))
    assert broken(job, HISTORY) == ["attempt 3 took epoch 2, and attempt 2 did as well"]


def test_a_group_that_was_given_up_with_a_request_still_out(job: Job) -> None:
    append(job.root.attempt(2).session_log,
           {"event": "group.unjoined", "prompt": "0:5", "attempt": 1, "requests": 1})  # fmt: skip
    (problem,) = broken(job, HISTORY)
    assert problem.startswith("group 0:5 was given up with 1 of its requests still out")


@pytest.mark.parametrize(
    ("made", "missing"),
    [
        (("e2.u4", "e2.u8"), []),
        (("e1.u4", "e2.u8"), ["update 4 was not evaluated on held; e1.u4 was undone, and taken"]),
        (("e2.u8",), ["update 4 was not evaluated on held"]),
        (("e2.u4", "e3.u8"), []),
    ],
)
def test_an_update_that_only_an_undone_policy_was_evaluated_at(
    job: Job, made: Sequence[str], missing: Sequence[str]
) -> None:
    evaluated(job, *made)
    found = list(unevaluated(job, chain(*HISTORY, epoch(3, commit(2, 8)))))
    assert [problem.partition(" for it")[0] for problem in found] == missing


def test_a_try_that_failed_is_no_evaluation(job: Job) -> None:
    evaluated(job, "e2.u4")
    evaluated(job, "e2.u8", state="failed")
    assert list(unevaluated(job, HISTORY)) == ["update 8 was not evaluated on held"]
