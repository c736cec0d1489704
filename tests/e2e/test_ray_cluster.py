"""`milepost run` on a Ray cluster of two nodes, one of which is lost on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.launch.receipts import Receipts
from runtime.rundir import history
from tests.e2e import ray_cluster
from tests.e2e.checks import assert_whole
from tests.e2e.ray_cluster import RayCluster
from tests.e2e.running import Run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.running(2) as cluster:
        yield cluster


@pytest.fixture
def environ(cluster: RayCluster, tmp_path: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_TOKEN_PATH": str(cluster.token_path),
        "MILEPOST_LAUNCH_RECEIPTS": str(tmp_path / "receipts"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }


def sets_for(cluster: RayCluster, run: Run) -> list[str]:
    return [
        'launch.backend="ray"', f'launch.cluster="{cluster.url}"', "launch.replicas=2",
        f'launch.weka_mounts=["{run.file.parent}", "{run.made}"]', "core.data=2",
        "rollout.engines=2", 'launch.auto_resume="milepost"', "data.epochs=200",
        "core.max_updates=30", f'output.compiler_cache="{run.made}/caches"',
    ]  # fmt: skip


def milepost(run: Run, sets: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    flags = [part for each in sets for part in ("--set", each)]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(run.file), *flags, "--json"],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_lost_node_interrupts_the_attempt_and_the_next_one_completes_the_run(
    cluster: RayCluster, environ: dict[str, str], make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    command = milepost(run, sets_for(cluster, run), environ)
    try:
        until(lambda: run.root.chain.exists() and run.commits, command, "the first commits")
        until(lambda: history.committed_update(run.records) >= 4, command, "update 4")
        assert len(engine_addresses(run, 1)) == (2 if cluster.has_namespaces else 1)
        seen = history.committed_update(run.records)
        cluster.nodes[1].kill()
        cluster.add()
        out, err = command.communicate(timeout=1200)
    finally:
        command.kill()
    assert command.returncode == 0, err + run.log()
    answer: dict[str, Any] = json.loads(out)
    assert (answer["state"], answer["update"]) == ("complete", 30)
    # Attempt 1 ended as interrupted; attempt 2 went on from its last commit under a new epoch.
    first = next(r for r in run.records if r.kind == "end")
    assert first.failure is not None
    assert (first.failure.error_class, first.failure.retry) == ("Interrupted", "launch")
    newest = history.newest_epoch(run.records)
    assert newest is not None
    assert (newest.attempt, newest.epoch) == (2, 2)
    assert newest.restored_update >= seen
    run.until(lambda: not run.processes(), "all processes to leave", attach=False)
    assert_whole(run, updates=30)
    # Each host's caches were looked for and asked after; a run without compilation leaves none.
    assert [row["problems"] for row in run.events("cache.restored")] == [{}, {}]
    assert [row["parts"] for row in run.events("cache.published")] == [{}]
    receipts = Receipts(tmp_path / "receipts").of_root(run.root.path)
    assert [(r.attempt, r.backend) for r in receipts] == [(1, "ray"), (2, "ray")]


def test_an_attempt_that_leaves_in_good_order_on_sigterm_is_followed(
    cluster: RayCluster, environ: dict[str, str], make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Ray sees a process leave and knows nothing of why; the run is not complete."""
    run = make_run()
    command = milepost(run, sets_for(cluster, run), environ)
    try:
        until(lambda: run.root.chain.exists() and run.commits, command, "the first commits")
        (guard,) = run.role("guard")
        guard.terminate()
        out, err = command.communicate(timeout=1200)
    finally:
        command.kill()
    assert command.returncode == 0, err + run.log()
    answer: dict[str, Any] = json.loads(out)
    assert (answer["state"], answer["update"]) == ("complete", 30)
    first = next(r for r in run.records if r.kind == "end")
    assert (first.state, first.ended_by, first.failure) == ("training", "sigterm", None)
    newest = history.newest_epoch(run.records)
    assert newest is not None
    assert (newest.attempt, newest.restored_update) == (2, first.update)
    receipts = Receipts(tmp_path / "receipts").of_root(run.root.path)
    assert [each.attempt for each in receipts] == [1, 2]


def engine_addresses(run: Run, attempt: int) -> set[str]:
    """Where the engines of an attempt listened: a node each."""
    logs = "".join(p.read_text() for p in run.root.attempt(attempt).path.glob("engine-*.log"))
    return set(re.findall(r"url=http://([0-9.]+):", logs))


def until(
    is_so: Callable[[], object],
    command: subprocess.Popen[str],
    what: str,
    said: Callable[[], str] = str,
) -> None:
    """Wait for something, for as long as the command lives; ``said`` helps to see why not."""
    end = time.monotonic() + 900
    while not is_so():
        if command.poll() is not None:
            out, err = command.communicate()
            raise AssertionError(f"the command ended, waiting for {what}: {out}\n{err}\n{said()}")
        assert time.monotonic() < end, f"waited for {what}\n{said()}"
        time.sleep(0.5)
