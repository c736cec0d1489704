"""Constructed attempt histories, in the scheduler package's own messages, and the class of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("beaker", reason="pip install -e '.[launch]'")

from beaker import beaker_pb2 as pb2

from runtime.errors import Interrupted, Preempted, TrainerLost
from runtime.launch.beaker_status import CODES, standing_of
from runtime.launch.standing import AttemptClass, AttemptStanding
from runtime.launch.telling import told, with_end
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord
from tests.runtime.launch.owned_runs import own

P, S, R = AttemptClass.PENDING, AttemptClass.STARTING, AttemptClass.RUNNING
OK, F, PRE = AttemptClass.SUCCEEDED, AttemptClass.FAILED, AttemptClass.PREEMPTED
INT, C, STOP = AttemptClass.INTERRUPTED, AttemptClass.CANCELED, AttemptClass.STOPPED
SUBMITTED, QUEUED, INITIALIZING, RUNNING, STOPPING, UPLOADING = 1, 2, 3, 4, 5, 6
CANCELED, SUCCEEDED, FAILED, READY = 7, 8, 9, 10


def job(
    status: int,
    *,
    rank: int | None = None,
    size: int = 2,
    code: int | None = None,
    exit_code: int | None = None,
    at: int = 100,
    group: str = "g1",
    leader: bool | None = None,
    finalized: bool | None = None,
    gpus: int = 0,
    slots: int = 0,
    **texts: str,
) -> Any:
    """One job; over unless its status says otherwise."""
    made = pb2.Job(id=f"{rank or 0}-{at}")
    made.status.status = status
    made.status.created.seconds = at
    for name, text in texts.items():
        setattr(made.status, name, text)
    if code is not None:
        made.status.canceled.seconds = at + 5
        made.status.canceled_code = code
    if exit_code is not None:
        made.status.exit_code = exit_code
        made.status.exited.seconds = at + 6
    if (status in (CANCELED, SUCCEEDED, FAILED)) if finalized is None else finalized:
        made.status.finalized.seconds = at + 7
    if rank is not None:
        details = made.system_details.replica_group_details
        details.id, details.rank, details.size = group, rank, size
        details.is_leader_replica = rank == 0 if leader is None else leader
    made.assignment_details.node_id = f"node-{rank or 0}"
    made.assignment_details.resource_assignment.gpus.extend(str(i) for i in range(gpus))
    made.assignment_details.resource_assignment.assigned_slots_count = slots
    return made


def both(status: int, **more: Any) -> list[Any]:
    return [job(status, rank=rank, **more) for rank in (0, 1)]


HISTORIES: dict[str, tuple[list[Any], AttemptClass]] = {
    "no jobs yet": ([], P),
    "submitted": ([job(SUBMITTED)], P),
    "queued with a blocker": ([job(QUEUED, failed_scheduling_message="no free GPUs")], P),
    "initializing": ([job(INITIALIZING)], S),
    "waiting for its group": ([job(READY, rank=0), job(QUEUED, rank=1)], P),
    "group is starting": (both(READY), S),
    "running": ([job(RUNNING)], R),
    "group is running": (both(RUNNING), R),
    "stopping": ([job(STOPPING)], R),
    "uploading": ([job(UPLOADING, exit_code=0)], R),
    "succeeded": ([job(SUCCEEDED, exit_code=0)], OK),
    "group succeeded": (both(SUCCEEDED, exit_code=0), OK),
    "failed": ([job(FAILED, exit_code=1)], F),
    "one rank failed, the other followed": (
        [job(CANCELED, rank=0, code=8), job(FAILED, rank=1, exit_code=1)],
        F,
    ),
    "one rank failed, the leader has not heard": (
        [job(RUNNING, rank=0), job(FAILED, rank=1, exit_code=1)],
        R,
    ),
    "one rank failed, the leader is being ended": (
        [job(STOPPING, rank=0, code=8), job(FAILED, rank=1, exit_code=1)],
        R,
    ),
    "over with nothing to tell how": ([job(RUNNING, finalized=True)], STOP),
    "canceled without a code": ([job(CANCELED)], C),
    "code 1 system_preemption": ([job(CANCELED, code=1)], PRE),
    "code 2 user_preemption": ([job(CANCELED, code=2)], PRE),
    "code 3 idle": ([job(CANCELED, code=3)], C),
    "code 4 manual": ([job(CANCELED, code=4)], C),
    "code 5 timeout": ([job(CANCELED, code=5)], F),
    "code 6 node_unavailable": ([job(CANCELED, code=6)], INT),
    "code 7 impossible_to_schedule, still there": ([job(CANCELED, code=7, finalized=False)], P),
    "code 7 impossible_to_schedule, over": ([job(CANCELED, code=7)], F),
    "code 8 sibling_task_failed": (both(CANCELED, code=8), INT),
    "code 9 sibling_task_preemption alone": ([job(CANCELED, rank=1, code=9)], INT),
    "code 9 beside the sibling": (
        [job(CANCELED, rank=0, code=9), job(CANCELED, rank=1, code=1)],
        PRE,
    ),
    "code 10 healthcheck_failed": ([job(CANCELED, code=10)], INT),
    "code 11 sibling_task_retry": ([job(CANCELED, rank=0, code=11)], INT),
    "code 12 node_unhealthy": ([job(CANCELED, code=12)], INT),
    "a code nobody knows": ([job(CANCELED, code=4711)], STOP),
    "a cancel code decides before an exit code": ([job(FAILED, code=1, exit_code=137)], PRE),
    "preempted, the other rank has not heard": (
        [job(RUNNING, rank=0), job(CANCELED, rank=1, code=1)],
        PRE,
    ),
    "is being preempted": ([job(STOPPING, code=1)], R),
    "a retried replica runs": (
        [
            job(CANCELED, rank=0, code=6, at=100),
            job(CANCELED, rank=1, code=11, at=100),
            *both(RUNNING, at=200, group="g2"),
        ],
        R,
    ),
    "a retried replica waits": ([job(FAILED, exit_code=1, at=50), job(QUEUED, at=60)], P),
    "jobs come in any order": ([job(RUNNING, at=200), job(CANCELED, code=1, at=100)], R),
    "killed by its exit code": ([job(RUNNING, exit_code=9, finalized=True)], F),
    "left without a final status": ([job(UPLOADING, exit_code=0, finalized=True)], OK),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_class_of(name: str) -> None:
    jobs, expected = HISTORIES[name]
    assert standing_of(jobs).kind is expected


def test_there_are_thirty_histories_and_every_code_is_among_them() -> None:
    assert len(HISTORIES) >= 30
    codes = {int(j.status.canceled_code) for jobs, _ in HISTORIES.values() for j in jobs}
    assert codes >= set(CODES) >= {v for v in pb2.CancelationCode.values() if v}


def test_a_follower_names_its_sibling() -> None:
    standing = standing_of([job(CANCELED, rank=0, code=9), job(CANCELED, rank=1, code=1)])
    follower, first = standing.ranks
    assert "followed rank 1 (canceled (system_preemption) on node-1)" in follower.reason
    assert standing.reason.startswith("rank 1 on node-1")
    assert (follower.kind, first.kind) == (INT, PRE)


LEFT: dict[str, Any] = {
    "by itself": job(FAILED, rank=0, exit_code=3),
    "and was ended with its sibling": job(CANCELED, rank=0, code=8, exit_code=3),
}


@pytest.mark.parametrize("how", LEFT)
def test_a_follower_that_leaves_before_its_leader_says_nothing_of_why(
    tmp_path: Path, how: str
) -> None:
    """The leader loses its lease; its Ray ends first, with that the follower, then the guard."""
    root = RunRoot.of(tmp_path / "run")
    own(root, attempt=1)
    follower = job(FAILED, rank=1, exit_code=1)

    def seen(leader: Any) -> AttemptStanding:
        return told(standing_of([leader, follower]), Chain(root).read(), 1)

    assert seen(job(RUNNING, rank=0)).kind is R
    assert (seen(LEFT[how]).kind, seen(LEFT[how]).is_turned_away) == (INT, False)
    own(root, attempt=2, epoch=2)
    assert (seen(LEFT[how]).kind, seen(LEFT[how]).is_turned_away) == (STOP, True)


def test_the_exit_of_a_follower_is_not_the_guards() -> None:
    jobs = [job(CANCELED, rank=0, code=8), job(FAILED, rank=1, exit_code=3)]
    standing = standing_of(jobs)
    assert (standing.kind, standing.exit_code) == (F, None)


@pytest.mark.parametrize(("code", "kind"), [(1, PRE), (4, C), (6, INT)])
def test_what_took_a_guard_away_that_waited_for_its_lease_stands(code: int, kind: Any) -> None:
    jobs = [job(CANCELED, rank=0, code=9, exit_code=3), job(CANCELED, rank=1, code=code)]
    standing = told(standing_of(jobs), (), 2)
    assert (standing.kind, standing.is_turned_away) == (kind, False)


def test_a_blocker_is_the_reason() -> None:
    standing = standing_of([job(QUEUED, failed_scheduling_message="no free GPUs")])
    assert standing.reason == "no free GPUs"
    blocked = job(CANCELED, code=7, finalized=False, failed_scheduling_message="no such GPU")
    assert standing_of([blocked]).reason == "blocked: no such GPU"


ODD: dict[str, tuple[list[Any], str]] = {
    "two groups": (
        [job(RUNNING, rank=0), job(RUNNING, rank=1, group="g2")],
        "2 groups: g1, g2",
    ),
    "a rank is missing": (
        [job(RUNNING, rank=0, size=3), job(RUNNING, rank=2, size=3)],
        "no rank 1",
    ),
    "no leader": ([job(RUNNING, rank=0, leader=False), job(RUNNING, rank=1)], "leader selection"),
    "the wrong leader": (
        [job(RUNNING, rank=0, leader=False), job(RUNNING, rank=1, leader=True)],
        "the leader is rank 1",
    ),
    "a rank too many": ([*both(RUNNING), job(RUNNING, rank=2)], "outside 0..1"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_off_about_a_group_is_said(name: str) -> None:
    jobs, said = ODD[name]
    assert said in "; ".join(standing_of(jobs).oddities)


@pytest.mark.parametrize("jobs", [both(RUNNING), [job(RUNNING)], both(CANCELED, code=1)])
def test_nothing_is_off_about_a_whole_group(jobs: list[Any]) -> None:
    assert standing_of(jobs).oddities == ()


def test_gpus_that_are_paid_for_are_told_apart_from_those_that_run() -> None:
    standing = standing_of([job(RUNNING, gpus=1, slots=2)])
    assert (standing.active_gpus, standing.allocated_gpus) == (1, 2)
    assert standing_of([job(QUEUED)]).active_gpus is None


def end(error: Exception | None, **fields: Any) -> EndRecord:
    failure = Failure.of(error, step="segment", time=0.0) if error else None
    return EndRecord.model_validate(
        {"seq": 1, "epoch": 1, "time": 0.0, "state": "failed", "ended_by": "failure", "update": 3,
         "failure": failure, **fields}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Interrupted("a node"), INT), (Preempted("taken"), PRE), (TrainerLost("a rank"), F)],
)
def test_the_attempts_own_last_word_tells_why_it_failed(
    error: Exception, kind: AttemptClass
) -> None:
    failed = standing_of([job(FAILED, exit_code=1)])
    assert with_end(failed, end(error)).kind is kind
    assert told(failed, None, 1).kind is F
    # Where the scheduler knows that it took the hardware back, that stands.
    assert with_end(standing_of([job(CANCELED, code=1)]), end(error)).kind is PRE


def test_a_run_that_said_complete_succeeded_whatever_its_exit() -> None:
    said = end(None, state="complete", ended_by="max_updates")
    assert with_end(standing_of([job(RUNNING, finalized=True)]), said).kind is OK
