"""The laptop preset with background evaluation, a real server, a worker and a schedule that fires.

Takes minutes: ``make test-evaluations``. MILEPOST_SHOTS names a folder for pictures of the UI.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from runtime.evaluation.receipts import EvaluationReceipt, derive
from runtime.evaluation.records import Started
from runtime.rundir import workflow
from runtime.rundir.layout import RunRoot
from tests.e2e.running import processes_of

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.ray,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.environ.get("MILEPOST_EVALUATIONS") != "1", reason="make test-evaluations"
    ),
]
LAST = 120
EVERY = 20
OFF = 90
"""A commit that is still there at the end, and no evaluation's update."""
PATIENCE_S = 1800.0
MILEPOST = [sys.executable, "-m", "flows.cli"]


class Lane:
    """A server with a worker, and one run of the preset beside it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.root = RunRoot(folder / "runs" / "laptop")
        self.port = port
        self.env = os.environ | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "MILEPOST_RUNS": str(folder / "runs"),
        }
        self.up = subprocess.Popen(
            [*MILEPOST, "up", "--port", str(port), "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            start_new_session=True,
        )
        assert self.up.stdout is not None
        self.deployed = json.loads(self.up.stdout.readline())["deployments"]

    def api(self, path: str, body: object = None) -> Any:
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}/api", timeout=60) as client:
            answer = client.get(path) if body is None else client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def milepost(self, *arguments: str) -> int:
        return subprocess.run([*MILEPOST, *arguments], env=self.env, check=False).returncode

    def start(self) -> subprocess.Popen[bytes]:
        sets = [
            f"output.root={json.dumps(str(self.root.path))}",
            f"core.max_updates={LAST}",
            'evaluation.mode="background"',
            f"evaluation.every_updates={EVERY}",
            "checkpoint.every_updates=30",
            "checkpoint.keep=3",
            'tracking.mode="disabled"',
        ]
        options = [part for each in sets for part in ("--set", each)]
        preset = Path("configs/presets/laptop.toml")
        return subprocess.Popen([*MILEPOST, "run", str(preset), *options], env=self.env)

    def final(self) -> EvaluationReceipt | None:
        (folder,) = list(self.root.evaluations.glob(f"e*.u{LAST}/holdout")) or [None]
        return None if folder is None else derive(folder, stands=True)

    def started(self, number: int) -> Started:
        """Wait for a try of the final evaluation to run."""
        found: list[Started] = []

        def runs() -> bool:
            for path in self.root.evaluations.glob(
                f"e*.u{LAST}/holdout/tries/{number}/started.json"
            ):
                found[:] = [Started.model_validate_json(path.read_bytes())]
            return bool(found)

        self.until(runs, f"try {number} of the final evaluation")
        return found[0]

    def until(self, is_so: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, f"waited too long for {what}"
            time.sleep(0.2)

    def shoot(self, name: str, page: str) -> None:
        folder = os.environ.get("MILEPOST_SHOTS")
        browser = shutil.which("chromium")
        if folder is None or browser is None:
            return
        target = Path(folder) / f"{name}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            command = [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", "--window-size=1500,1300",
                "--virtual-time-budget=30000", "--timeout=60000", f"--screenshot={target}",
                f"http://127.0.0.1:{self.port}/{page}",
            ]  # fmt: skip
            subprocess.run(command, check=False, capture_output=True, timeout=180)


@pytest.fixture
def lane() -> Iterator[Lane]:
    folder = Path(tempfile.mkdtemp(prefix="mpbg-"))
    (folder / "runs").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Lane(folder, port)
    yield made
    children = psutil.Process(made.up.pid).children(recursive=True)
    made.up.send_signal(signal.SIGINT)
    made.up.wait(120)
    for process in (*children, *processes_of(made.root.attempts)):
        if process.is_running():
            process.kill()
    if os.environ.get("MILEPOST_KEEP_E2E") != "1":
        shutil.rmtree(folder, ignore_errors=True)


def test_a_final_evaluation_that_is_killed_twice_is_brought_home_by_the_schedule(
    lane: Lane,
) -> None:
    deployment = lane.deployed["resubmit/evaluations"]
    soon = {"first_delay_s": 5, "runs": [str(lane.root.path)]}
    every = {"schedule": {"interval": 20}, "active": True, "parameters": soon}
    lane.api(f"/deployments/{deployment}/schedules", [every])
    run = lane.start()

    psutil.Process(lane.started(0).pid).kill()
    lane.until(lambda: run.poll() is not None, "the run to be complete")
    assert workflow.read(lane.root).state == "complete"  # it waits for no result
    assert run.returncode == 5
    assert lane.milepost("status", str(lane.root.path)) == 5

    psutil.Process(lane.started(1).pid).kill()
    lane.until(lambda: (r := lane.final()) is not None and r.state == "succeeded", "the result")
    assert lane.milepost("status", str(lane.root.path)) == 0

    receipt = lane.final()
    assert receipt is not None
    reasons = [t.result.reason for t in receipt.tries if t.result is not None]
    assert reasons == ["crashed", "crashed", None]
    for again in receipt.tries[1:]:
        assert again.submission is not None
        by, _, flow_run = again.submission.by.partition(" ")
        found = lane.api(f"/flow_runs/{flow_run}")
        assert (by, found["auto_scheduled"]) == ("resubmission", True)
        assert found["created_by"]["type"] == "SCHEDULE"
    assert_cadence_landed(lane)
    assert_asked_by_hand(lane)
    assert_training_never_paused(lane)

    lane.until(lambda: "1 done" not in newest_table(lane)["description"], "one more pass")
    for index, again in enumerate(receipt.tries):
        assert again.started is not None
        lane.shoot(f"evaluation-try-{index}", f"runs/flow-run/{again.started.flow_run}")
    lane.shoot("flow-runs", "runs")
    lane.shoot("table", f"artifacts/artifact/{newest_table(lane)['id']}")
    lane.shoot("deployment", f"deployments/deployment/{deployment}")


def newest_table(lane: Lane) -> dict[str, Any]:
    """Of evaluations. Its own page shows it; that of its key only lists tables."""
    asked = {"artifacts": {"key": {"any_": ["evaluations"]}}, "sort": "CREATED_DESC", "limit": 1}
    (found,) = lane.api("/artifacts/filter", asked)
    return found


def assert_cadence_landed(lane: Lane) -> None:
    """Every twentieth update has its result, or a reason; none was computed twice."""
    for update in range(EVERY, LAST + 1, EVERY):
        (folder,) = lane.root.evaluations.glob(f"e*.u{update}/holdout")
        lane.until(
            lambda folder=folder: derive(folder, stands=True).state == "succeeded",
            f"the result of update {update}",
        )
        receipt = derive(folder, stands=True)
        assert receipt is not None
        assert receipt.lag_updates is not None
        items = [json.loads(line)["index"] for line in (folder / "items.jsonl").open()]
        assert sorted(items) == list(range(256))


def assert_asked_by_hand(lane: Lane) -> None:
    """A commit off the cadence is evaluated for who asks, and the next who asks is shown that."""
    asked = ("evaluate", str(lane.root.path), "--update", str(OFF), "--wait", str(PATIENCE_S))
    assert lane.milepost(*asked) == 0
    (folder,) = lane.root.evaluations.glob(f"e*.u{OFF}/holdout")
    receipt = derive(folder, stands=True)
    assert receipt is not None
    (only,) = receipt.tries
    assert only.submission is not None
    assert only.submission.by == "a person"
    assert lane.milepost(*asked) == 0
    assert derive(folder, stands=True) == receipt


def assert_training_never_paused(lane: Lane) -> None:
    """The gate stayed open, and calls were under way, all the time evaluations ran."""
    rows = [json.loads(line) for line in lane.root.pipeline_occupancy.open()]
    assert rows
    assert not any(row["values"]["generation_admission_paused"] for row in rows)
