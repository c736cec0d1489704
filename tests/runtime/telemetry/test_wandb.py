"""The real wandb, offline, in processes of its own: its service and exit hooks stay there."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
import psutil
from runtime.clock import SystemClock
from runtime.telemetry import log
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.rows import Owner
from runtime.telemetry.sinks import Axis, WandbSettings
root = Path(sys.argv[1])
log.configure(root / "session.log", run="r", attempt=1, role="session", epoch=1)
def settings(mode="offline", **more):
    return WandbSettings(mode=mode, project="p", name="n", config={"lr": 0.1}, **more)
def recorder(tracking, epoch=1):
    return Recorder(root, Owner(attempt=1, epoch=epoch), clock=SystemClock(), tracking=tracking)
def service():
    return [c for c in psutil.Process().children() if "wandb-core" in " ".join(c.cmdline())]
def until(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"never: {what}")
        time.sleep(0.02)
"""

Session = Callable[..., dict[str, object]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Runs code after PRELUDE and returns what it puts into ``answer``, plus its standard error."""

    def run(code: str, **env: str) -> dict[str, object]:
        whole = PRELUDE + "answer = {}\n" + code + "\nprint('ANSWER' + json.dumps(answer))\n"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        clean |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"} | env
        done = subprocess.run(
            [sys.executable, "-c", whole, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=50,
            env=clean,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.split("ANSWER")[1])
        return answer | {"stderr": done.stderr, "stdout": done.stdout.split("ANSWER")[0]}

    return run


def recorded(root: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """History rows and metric definitions of all offline runs, read by wandb's own tool."""
    history: list[dict[str, object]] = []
    metrics: list[dict[str, object]] = []
    for path in sorted(root.glob("wandb/offline-run-*/*.wandb")):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(path)],
            capture_output=True,
            text=True,
            timeout=40,
            env={**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_CACHE_DIR": str(root)},
        )
        for line in done.stdout.splitlines():
            record = json.loads(line)
            if record["type"] == "history":
                history.append(record["history"]["item"])
            elif record["type"] == "metric":
                metrics.append(record["metric"])
    return history, metrics


def events(root: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (root / "session.log").read_text().splitlines()]


def named(root: Path, event: str) -> list[dict[str, object]]:
    return [line for line in events(root) if line["event"] == event]


def test_offline_files_hold_every_row_on_its_axis_and_no_network_is_touched(
    session: Session, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        answer = session(
            """
r = recorder(settings()).start()
for i in range(1, 51):
    r.metrics.log(Axis.TRAIN, i, {"train/loss": i / 2, "train/policy_grad_norm": None})
    r.contracts.write("optimizer", update=i, holds=True, values={"policy_loss": 0.0})
r.metrics.log(Axis.TRAIN, 50, {"train/loss": 7.0})
r.metrics.log(Axis.ERRORS, 15.0, {"errors/transport_groups": 1})
r.close()
answer["left"] = len(service())
""",
            WANDB_BASE_URL=url,
            HTTP_PROXY=url,
            HTTPS_PROXY=url,
        )
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert answer["left"] == 0
    assert answer["stdout"] == ""
    assert answer["stderr"] == ""
    history, metrics = recorded(tmp_path)
    steps = [row["train/update"] for row in history if "train/update" in row]
    # Rows of one step are one; a key that comes again is a row of its own.
    assert [int(str(step)) for step in steps] == [*range(1, 51), 50]
    joined = [row for row in history if "contracts/optimizer/policy_loss" in row]
    assert [float(str(row["train/loss"])) for row in joined] == [i / 2 for i in range(1, 51)]
    assert all("train/policy_grad_norm" not in row for row in history)
    assert {str(row["epoch"]) for row in history} == {"1"}
    axes = {str(m["glob_name"]): m["step_metric"] for m in metrics if m.get("glob_name")}
    assert axes["errors/*"] == "errors/elapsed_seconds"
    assert axes["train/*"] == "train/update"
    local = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(local) == len(history) == 52
    (ended,) = named(tmp_path, "tracking.ended")
    assert (ended["num_sent"], ended["num_dropped"]) == (102, 0)
    ours = {"wandb", "metrics.jsonl", "session.log", "contracts"}
    assert {p.name for p in tmp_path.iterdir()} <= ours


def test_a_resumed_run_keeps_its_id(session: Session, tmp_path: Path) -> None:
    code = """
r = recorder(settings(), epoch=int(os.environ["EPOCH"])).start()
r.metrics.log(Axis.TRAIN, 7, {"train/loss": 1.0})
r.close()
"""
    session(code, EPOCH="1")
    first = json.loads((tmp_path / "wandb" / "run.json").read_text())["run_id"]
    session(code, EPOCH="2")
    assert json.loads((tmp_path / "wandb" / "run.json").read_text())["run_id"] == first
    folders = [p.name for p in (tmp_path / "wandb").glob("offline-run-*")]
    assert all(name.endswith(first) for name in folders)
    history, _ = recorded(tmp_path)
    assert sorted(str(row["epoch"]) for row in history) == ["1", "2"]


def test_a_killed_service_is_said_once_and_hurts_nothing(session: Session, tmp_path: Path) -> None:
    answer = session(
        """
r = recorder(settings()).start()
r.metrics.log(Axis.TRAIN, 1, {"train/loss": 1.0})
sink = r._wandb
until(lambda: sink.sent == 1, "first row")
for child in service():
    child.kill()
    child.wait(10)
for i in range(2, 200):
    r.metrics.log(Axis.TRAIN, i, {"train/loss": 1.0})
until(lambda: not sink._thread.is_alive(), "end of the thread")
r.metrics.log(Axis.TRAIN, 200, {"train/loss": 1.0})
r.close()
answer["dropped"] = sink.dropped
"""
    )
    assert answer["stderr"] == ""
    assert int(str(answer["dropped"])) >= 100
    assert len(named(tmp_path, "tracking.failed")) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200
    assert json.loads((tmp_path / "wandb" / "run.json").read_text())["state"] == "failed"


def test_a_frozen_service_is_cut_off_at_the_limit(session: Session, tmp_path: Path) -> None:
    answer = session(
        """
r = recorder(settings(finish_timeout_s=1.0)).start()
r.metrics.log(Axis.TRAIN, 1, {"train/loss": 1.0})
until(lambda: r._wandb.sent == 1, "first row")
for child in service():
    child.send_signal(signal.SIGSTOP)
r.close()
answer["left"] = len(service())
answer["alive"] = r._wandb._thread.is_alive()
"""
    )
    assert answer["left"] == 0
    assert answer["alive"] is False
    assert answer["stderr"] == ""
    assert len(named(tmp_path, "tracking.abandoned")) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_said_once(session: Session, tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("in the way")
    answer = session(
        """
r = recorder(settings()).start()
for i in range(5):
    r.metrics.log(Axis.TRAIN, i, {"train/loss": 1.0})
r.close()
"""
    )
    assert answer["stderr"] == ""
    assert len(named(tmp_path, "tracking.failed")) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_online_without_a_key_goes_offline_without_a_prompt(
    session: Session, tmp_path: Path
) -> None:
    session(
        """
r = recorder(settings("online")).start()
r.metrics.log(Axis.TRAIN, 1, {"train/loss": 1.0})
r.close()
"""
    )
    (fell,) = named(tmp_path, "tracking.fell_back")
    assert fell["reason"] == "no API key"
    assert len(recorded(tmp_path)[0]) == 1


def test_online_without_a_server_falls_back_to_offline_files(
    session: Session, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    session(
        """
r = recorder(settings("online", init_timeout_s=1.0)).start()
for i in range(5):
    r.metrics.log(Axis.TRAIN, i, {"train/loss": 1.0})
r.close()
""",
        WANDB_API_KEY="a" * 40,
        WANDB_BASE_URL=f"http://127.0.0.1:{port}",
    )
    assert len(named(tmp_path, "tracking.fell_back")) == 1
    assert len(recorded(tmp_path)[0]) == 5
    assert "a" * 40 not in (tmp_path / "session.log").read_text()
