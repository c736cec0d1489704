"""`milepost up` on a real server: twice is once, and it ends what it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import httpx
import psutil
import pytest
from prefect.client.orchestration import PrefectClient

from flows.commands._deploying import checkout, ensure_automations
from flows.commands._server import api_url

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(300)]
END_S = 60


class Up:
    """One `milepost up` as a process of its own, with a Prefect home of its own."""

    def __init__(self, home: Path, port: int, *more: str) -> None:
        self.api = api_url(port)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "up", "--port", str(port), "--json", *more],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PREFECT_HOME": str(home)},
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def get(self, path: str, body: object = None) -> Any:
        with httpx.Client(base_url=self.api, timeout=20, trust_env=False) as client:
            answer = client.get(path) if body is None else client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def first(home: Path, port: int) -> Iterator[tuple[Up, dict[str, Any]]]:
    up = Up(home, port)
    answer = up.answer()
    yield up, answer
    pids = [answer["server_pid"], answer["worker_pid"]]
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert up.interrupt() == 0
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        process.kill()
    assert not alive


def test_everything_is_on_the_server(first: tuple[Up, dict[str, Any]]) -> None:
    up, answer = first
    assert answer["server"] == "started"
    assert answer["work_pool"] == {"name": "milepost", "was": "created"}
    (made,) = answer["automations"].values()  # what a deployment triggers on is the deployment's
    assert made["was"] == "created"
    assert {each["slug"] for each in up.get("/block_types/filter", {})} >= set(answer["blocks"])
    deployment = up.get("/deployments/name/train/laptop")
    assert deployment["id"] == answer["deployments"]["train/laptop"]
    assert deployment["entrypoint"] == "flows.train.train"
    assert deployment["work_pool_name"] == "milepost"
    assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert deployment["global_concurrency_limit"]["limit"] == 1
    assert Path(deployment["parameters"]["run_file"]).is_file()
    (step,) = deployment["pull_steps"]
    assert Path(next(iter(step.values()))["directory"]) == checkout()


def test_the_worker_takes_runs_of_the_pool(first: tuple[Up, dict[str, Any]]) -> None:
    up, _ = first
    until = time.monotonic() + END_S
    workers: list[dict[str, Any]] = []
    while not workers:
        assert time.monotonic() < until, "the worker never came online"
        workers = up.get("/work_pools/milepost/workers/filter", {})
    assert workers[0]["name"] == "milepost-up"


def test_doing_it_again_changes_nothing_and_mends_what_was_changed(
    first: tuple[Up, dict[str, Any]], home: Path, port: int
) -> None:
    up, before = first
    automation = zombie(up)
    anyio.run(_pause, up.api, automation["id"])
    assert not up.get(f"/automations/{automation['id']}")["enabled"]
    again = Up(home, port, "--no-worker")
    after = again.answer()
    assert again.process.wait(END_S) == 0
    assert after["server"] == "found"
    assert after["work_pool"]["was"] == "kept"
    assert after["deployments"] == before["deployments"]
    assert len(up.get("/deployments/filter", {})) == len(before["deployments"])
    standing = zombie(up)
    assert len(up.get("/automations/filter", {})) == 2
    assert (standing["id"], standing["enabled"]) == (automation["id"], True)
    assert [each["was"] for each in after["automations"].values()] == ["updated"]
    assert [each["was"] for each in anyio.run(_automations, up.api).values()] == ["kept"]


def zombie(up: Up) -> dict[str, Any]:
    """The automation of automations.yaml; the other one belongs to a deployment."""
    (found,) = [a for a in up.get("/automations/filter", {}) if "heartbeat" in a["name"]]
    return found


async def _pause(api: str, automation: str) -> None:
    # Its client tries again while SQLite is locked (503).
    async with PrefectClient(api) as client:
        await client.pause_automation(UUID(automation))


async def _automations(api: str) -> dict[str, dict[str, str]]:
    async with PrefectClient(api) as client:
        return await ensure_automations(client, checkout())
