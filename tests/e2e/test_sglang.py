"""The laptop task on the real SGLang server: learned, although the server dies twice on the way."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from runtime.rundir import history
from tests.contracts.sglang_engine import PYTHON, need_environment
from tests.e2e.checks import assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(3600)]

PRESET = Path("configs/presets/laptop-sglang.toml")
WANTED = 0.9
UPDATES = 200
"""The preset makes 420; 0.9 was reached at 96."""


def test_the_laptop_task_is_learned_though_the_scheduler_is_killed_and_frozen(
    make_run: Callable[..., Run],
) -> None:
    need_environment()
    run = make_run(
        f'rollout.engine_python="{PYTHON}"',
        # Found out within seconds; a start on a busy machine counts against the hour.
        "health.interval=2.0",
        "health.misses=2",
        "health.restarts_per_hour=20",
        f"core.max_updates={UPDATES}",
    )
    text = PRESET.read_text().replace('root = "../../runs/laptop-sglang"', 'root = "run"')
    run.file.write_text(text)
    run.start()

    run.until_committed(20)
    scheduler = the_scheduler(run)
    scheduler.kill()
    until_back(run, 1)

    run.until_committed(history.committed_update(run.records) + 20)
    scheduler = the_scheduler(run)
    group = [p for p in run.processes() if group_of(p) == group_of(scheduler)]
    scheduler.send_signal(signal.SIGSTOP)
    until_back(run, 2)
    assert [p for p in group if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []

    run.finish()
    assert run.epoch == 1
    assert_whole(run, updates=UPDATES, consumed=32 * UPDATES)
    assert run.events("evaluation.finished")[-1]["mean"] >= WANTED
    # Found by whoever looked first: the monitor, or a publication that met the corpse.
    deaths = [event["reason"] for event in run.events("engine.died")]
    assert deaths[0].startswith(("its server process has exited", "not verified at"))
    assert "probes missed" in deaths[1] or deaths[1].startswith("not verified at")


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def the_scheduler(run: Run) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [p for p in run.processes() if title(p).startswith("sglang::scheduler")]
        return bool(found)

    run.until(is_there, "a scheduler")
    return found[0]


def title(process: psutil.Process) -> str:
    try:
        return process.cmdline()[0]
    except (psutil.Error, IndexError):
        return ""


def until_back(run: Run, deaths: int) -> None:
    """Until the slot has died so often, was started again, and serves after a publication."""
    run.until(lambda: len(run.events("engine.died")) >= deaths, f"death {deaths}")
    run.until(lambda: len(run.events("engine.restarted")) >= deaths, f"restart {deaths}")
    since = run.events("engine.restarted")[-1]["time"]
    run.until(
        lambda: run.events("engine.verified") and run.events("engine.verified")[-1]["time"] > since,
        "the new server to be verified",
    )
