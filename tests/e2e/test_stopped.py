"""Every way a run stops before its end, one after another on one root; and it goes on each time."""

import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.checkpoints.export import read_receipt
from runtime.evaluation.receipts import EvaluationReceipt, derive
from runtime.rundir import history
from runtime.rundir.records import EpochRecord
from runtime.session.answers import Ended
from runtime.session.ensure import ensure
from runtime.session.status import RESUMABLE, look
from tests.e2e.checks import assert_stopped, assert_whole
from tests.e2e.running import Run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]


def test_run_goes_on_after_every_kind_of_stop(make_run: Callable[..., Run]) -> None:
    run = make_run("core.max_updates=10000", "data.epochs=200", "evaluation.every_updates=1000")
    spoil_tracking(run)

    run.start_prepared("core.debug_exit_after=3", 'tracking.mode="offline"')
    assert_stopped(run, "debug_exit", "stopped")
    assert [c.update for c in run.commits] == [0, 2, 3]

    damaged = run.root.path / run.commits[-1].folder
    truncate(max(damaged.iterdir(), key=lambda p: p.stat().st_size))
    run.start()
    run.until_committed(6)
    assert restored(run) == "e1.u2"
    assert damaged.name in newest_epoch(run).reason
    assert damaged.is_dir()

    run.role("guard")[0].send_signal(signal.SIGTERM)
    assert_terminated(run)
    stopped_at = run.end.update

    run.start('launch.detach_grace="2s"')
    run.until(lambda: asked_at(run, stopped_at).reason, "the request of the stopped one to be void")
    assert asked_at(run, stopped_at).reason == "superseded"
    shutil.rmtree(run.root.export)
    run.until_epoch(3)
    run.until_ended(attach=False)
    assert_stopped(run, "parked", "parked")
    assert run.end.update >= stopped_at
    assert look(run.root).exit_code == RESUMABLE

    parked_at = run.end.update
    run.start()
    run.stop("stop")  # while it opens: nothing is trained
    assert_stopped(run, "stop", "stopped")
    assert run.end.update == parked_at

    assert_refuses_without_a_valid_commit(copy_of(run))

    run.start("core.max_run_seconds=1")
    run.finish()
    assert run.end.ended_by == "wall_clock"
    assert_whole(run, updates=run.end.update)


def assert_terminated(run: Run) -> None:
    """Nobody resumes it by himself: what it owes is asked for, and exported in the time left."""
    end = run.until_ended()
    assert (end.state, end.ended_by, end.activity) == ("training", "sigterm", "stopped"), run.log()
    assert run.commits[-1].update == end.update
    asked = asked_at(run, end.update)
    assert (asked.state, asked.request.kind, asked.request.mode) == (
        "requested", "final", "background",
    )  # fmt: skip
    exported = read_receipt(run.root.export)
    assert exported is not None
    assert exported.update == end.update
    assert look(run.root).exit_code == RESUMABLE


def asked_at(run: Run, update: int) -> EvaluationReceipt:
    (folder,) = run.root.evaluations.glob(f"e*.u{update}/held")
    receipt = derive(folder, stands=True)
    assert receipt is not None
    return receipt


def assert_refuses_without_a_valid_commit(run: Run) -> None:
    for commit in run.commits:
        for entry in commit.files:
            if not entry.name.startswith("ledger/"):
                (run.root.path / commit.folder / entry.name).unlink(missing_ok=True)
    commits = run.commits
    run.start()
    epoch = run.epoch
    end = run.until_ended()
    assert run.epoch == epoch or newest_epoch(run).epoch == end.epoch
    assert end.state == "failed"
    assert end.failure is not None
    assert end.failure.error_class == "NoValidCommit"
    for commit in commits:
        assert commit.folder in str(end.failure.detail["commits"])  # the message has a limit
    assert run.commits == commits
    # Nobody begins another epoch by itself.
    assert isinstance(ensure(run.root, "finish", timeout_s=0.0), Ended)


def copy_of(run: Run) -> Run:
    folder = run.file.parent / "copy"
    folder.mkdir()
    for name in ("run.toml", "letters.py"):
        shutil.copy(run.file.parent / name, folder / name)
    shutil.copytree(run.root.path, folder / "run")
    return replace(run, file=folder / "run.toml")


def spoil_tracking(run: Run) -> None:
    """A file where W&B wants its folder: nothing it does can work."""
    run.root.path.mkdir()
    run.root.wandb.write_text("in the way")


def newest_epoch(run: Run) -> EpochRecord:
    epoch = history.newest_epoch(run.records)
    assert epoch is not None
    return epoch


def restored(run: Run) -> str | None:
    return newest_epoch(run).restored


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
