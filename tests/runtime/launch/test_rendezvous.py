"""Replicas that meet over a folder: each a thread with a view of its own, or a process."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.clock import ManualClock
from runtime.errors import ConfigError, GroupIncomplete
from runtime.launch.group import Group
from runtime.launch.rendezvous import Head, Rendezvous, Replica, checked, new_nonce
from runtime.rundir.layout import AttemptDir, RunRoot


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    root = RunRoot.of(tmp_path / "run")
    root.create()
    attempt = root.attempt(1)
    attempt.path.mkdir()
    return attempt


def replica(rank: int, **fields: object) -> Replica:
    plain = {
        "rank": rank, "size": 3, "host": f"node-{rank}", "address": f"10.0.0.{rank + 1}", "gpus": 8,
        "lock": "l", "image": "i", "spec_digest": "s", "nonce": new_nonce(),
    }  # fmt: skip
    return Replica.model_validate(plain | fields)


def announce(path: Path, rank: int) -> None:
    Rendezvous.of(AttemptDir(path)).announce(replica(rank))


def test_three_processes_meet_and_one_of_them_came_first(attempt: AttemptDir) -> None:
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=announce, args=(attempt.path, rank)) for rank in range(3)]
    for other in others:
        other.start()
    found = Rendezvous.of(attempt).gather(3, deadline_s=60)
    for other in others:
        other.join(30)
    assert [each.rank for each in found] == [0, 1, 2]
    assert sum(each.is_first for each in found) == 1


def test_missing_ranks_are_named_in_time(attempt: AttemptDir) -> None:
    clock = ManualClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(5.0)

    meeting = Rendezvous(attempt=attempt, clock=clock, sleep=sleep)
    meeting.announce(replica(1))
    with pytest.raises(GroupIncomplete, match=r"rank 0, 2 of 3 .* 1 on node-1"):
        meeting.gather(3, deadline_s=100)
    assert len(slept) == 20
    assert "idle nodes" in GroupIncomplete.next_check


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"image": "other"}, "rank 1 has another image"),
        ({"lock": "other"}, "rank 1 has another lock"),
        ({"spec_digest": "other"}, "rank 1 has another spec digest"),
        ({"size": 4}, "rank 1 has another size"),
        ({"gpus": 4}, "rank 1 has another gpus"),
        ({"host": "node-0"}, "rank 0 and rank 1 are both on node-0"),
    ],
)
def test_the_odd_one_is_named(odd: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked([replica(0), replica(1, **odd), replica(2)], 3)


def test_replicas_without_gpus_may_share_a_host() -> None:
    cpu = [replica(rank, gpus=0, host="one") for rank in range(3)]
    assert checked(cpu, 3) == cpu


def test_a_file_system_with_two_winners_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 0, 2 all created"):
        checked([replica(0, is_first=True), replica(1), replica(2, is_first=True)], 3)


def beating(
    attempt: AttemptDir, epoch: int, acknowledged: Callable[[], dict[int, str]]
) -> Callable[[], None]:
    """A leader that beats in a thread until the returned call."""
    over = threading.Event()
    meeting = Rendezvous.of(attempt)

    def beat() -> None:
        count = 0
        while not over.wait(0.02):
            count += 1
            meeting.publish(
                Head(epoch=epoch, address="a:1", token="t", beat=count, acknowledged=acknowledged())
            )

    thread = threading.Thread(target=beat)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end


def test_an_old_head_attracts_nobody_and_a_live_one_only_whom_it_counts(
    attempt: AttemptDir,
) -> None:
    meeting = Rendezvous.of(attempt)
    mine = meeting.announce(replica(1))
    old = Head(epoch=1, address="old:1", token="t", beat=7, acknowledged={1: mine.nonce})
    meeting.publish(old)
    with pytest.raises(GroupIncomplete, match="did not acknowledge"):
        meeting.find_head(mine, deadline_s=0.5)
    end = beating(attempt, 2, lambda: {1: "the nonce of an earlier start"})
    try:
        with pytest.raises(GroupIncomplete, match="did not acknowledge"):
            meeting.find_head(mine, deadline_s=0.5)
    finally:
        end()
    end = beating(attempt, 3, lambda: {r: each.nonce for r, each in meeting.replicas().items()})
    try:
        assert meeting.find_head(mine, deadline_s=30).epoch == 3
    finally:
        end()


def test_a_silent_leader_is_noticed(attempt: AttemptDir) -> None:
    clock = ManualClock()
    meeting = Rendezvous(attempt=attempt, clock=clock)
    watch = meeting.watch_head()
    meeting.publish(Head(epoch=1, address="a", token="t", beat=1, acknowledged={}))
    assert not watch.is_gone()
    clock.advance(50)
    meeting.publish(Head(epoch=1, address="a", token="t", beat=2, acknowledged={}))
    assert not watch.is_gone()
    for _ in range(20):
        clock.advance(5)
        if watch.is_gone():
            return
    raise AssertionError("a leader that never beats again was taken for alive")


@pytest.mark.parametrize(
    ("environ", "group"),
    [
        ({}, Group(rank=0, size=1)),
        ({"BEAKER_REPLICA_RANK": "2", "BEAKER_REPLICA_COUNT": "3"}, Group(rank=2, size=3)),
    ],
)
def test_a_replica_knows_its_rank(environ: dict[str, str], group: Group) -> None:
    assert Group.of(environ, backend="beaker") == group


@pytest.mark.parametrize(
    "environ",
    [
        {"BEAKER_REPLICA_RANK": "1"},
        {"BEAKER_REPLICA_COUNT": "3"},
        {"BEAKER_REPLICA_RANK": "3", "BEAKER_REPLICA_COUNT": "3"},
        {"BEAKER_REPLICA_RANK": "-1", "BEAKER_REPLICA_COUNT": "3"},
        {"BEAKER_REPLICA_RANK": "x", "BEAKER_REPLICA_COUNT": "3"},
    ],
)
def test_a_rank_that_is_absent_or_inconsistent_stops(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Group.of(environ, backend="beaker")
