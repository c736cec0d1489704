"""`milepost run` with a group of two replicas, each on its own host, one of which is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("beaker", reason="pip install -e '.[launch]'")

from runtime.launch.receipts import Receipts
from runtime.launch.rendezvous import Rendezvous
from runtime.rundir import history
from tests.e2e.checks import assert_whole
from tests.e2e.replica_group import Scheduler, scheduling
from tests.e2e.running import Run
from tests.e2e.test_ray_cluster import engine_addresses, milepost, until
from tests.runtime.launch import fake_beaker
from tests.runtime.launch.fake_beaker import FakeBeaker
from tests.runtime.launch.submissions import IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
UPDATES = 30


@pytest.fixture
def beaker(tmp_path: Path) -> Iterator[FakeBeaker]:
    with fake_beaker.serving(tmp_path) as beaker:
        yield beaker


@pytest.fixture
def scheduler(beaker: FakeBeaker, tmp_path: Path) -> Iterator[Scheduler]:
    with scheduling(beaker, tmp_path) as scheduler:
        yield scheduler


@pytest.fixture
def environ(beaker: FakeBeaker, tmp_path: Path) -> dict[str, str]:
    return {
        **beaker.config(tmp_path),
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(tmp_path / "roots.pem"),
        "MILEPOST_LAUNCH_RECEIPTS": str(tmp_path / "receipts"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(Path.cwd()),
    }


def sets_for(run: Run) -> list[str]:
    return [
        'launch.backend="beaker"', 'launch.cluster="ai2/saturn"', 'launch.workspace="ai2/test"',
        f'launch.image="{IMAGE}"', "launch.replicas=2", "core.data=2", "rollout.engines=2",
        f'launch.weka_mounts=["{run.file.parent}", "{run.made}"]',
        'launch.auto_resume="milepost"', 'launch.synchronized_start_timeout="10m"',
        "data.epochs=200", f"core.max_updates={UPDATES}",
    ]  # fmt: skip


def test_a_lost_replica_interrupts_the_attempt_and_the_next_group_completes_the_run(
    scheduler: Scheduler, environ: dict[str, str], make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    command = milepost(run, sets_for(run), environ)

    def said() -> str:
        return "\n".join(group.log() for group in scheduler.groups.values())

    try:
        until(lambda: run.root.chain.exists() and run.commits, command, "a commit", said)
        until(lambda: history.committed_update(run.records) >= 4, command, "update 4", said)
        group = scheduler.group(1)
        assert group is not None
        seen = history.committed_update(run.records)
        group.kill(1)
        out, err = command.communicate(timeout=1200)
    finally:
        command.kill()
    assert command.returncode == 0, err + said() + run.log()
    answer: dict[str, Any] = json.loads(out)
    assert (answer["state"], answer["update"]) == ("complete", UPDATES)
    # Attempt 1 ended as interrupted; attempt 2 went on from its last commit under a new epoch.
    first = next(r for r in run.records if r.kind == "end")
    assert first.failure is not None
    assert (first.failure.error_class, first.failure.retry) == ("Interrupted", "launch")
    newest = history.newest_epoch(run.records)
    assert newest is not None
    assert (newest.attempt, newest.epoch) == (2, 2)
    assert newest.restored_update >= seen
    assert_met(run, scheduler)
    second = scheduler.group(2)
    assert second is not None
    assert [process.wait(60) for process in second.processes] == [0, 0]
    run.until(lambda: not run.processes(), "all processes to leave", attach=False)
    assert_whole(run, updates=UPDATES)
    receipts = Receipts(tmp_path / "receipts").of_root(run.root.path)
    assert [(r.attempt, r.backend) for r in receipts] == [(1, "beaker"), (2, "beaker")]
    assert scheduler.broken == []


def assert_met(run: Run, scheduler: Scheduler) -> None:
    """The replicas of both attempts met on hosts of their own, and each host had an engine."""
    hosts = {scheduler.hosts.address(number) for number in range(2)}
    for number in (1, 2):
        attempt = run.root.attempt(number)
        replicas = Rendezvous.of(attempt).replicas()
        assert {rank: each.host for rank, each in replicas.items()} == {0: "node-0", 1: "node-1"}
        assert sum(each.is_first for each in replicas.values()) == 1
        assert list(attempt.path.rglob("token")) == []  # the cluster's, gone with its leader
        if scheduler.hosts.is_real:
            assert {each.address for each in replicas.values()} == hosts
            assert engine_addresses(run, number) == hosts
