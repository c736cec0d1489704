"""One small model and its prompts for the whole lane, and nothing left behind by any test."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest

from runtime.drill.processes import processes_of
from runtime.publication.scratch import scratch_root, sweep
from runtime.recipes import laptop
from tests.e2e.running import Run

VERIFIER = '''
def score(response, answer, metadata):
    """Something a model without a warm-up can differ in: the share of lower-case letters."""
    if answer == "crash":
        raise RuntimeError("no verdict on this one")
    return sum(c.islower() for c in response) / max(1, len(response))
'''

RUN_FILE = """
name = "e2e"
seed = 3

[model]
path = "{made}/model"
dtype = "float32"

[data]
train = "{made}/train.jsonl"
max_prompt_tokens = 32

[rollout]
max_running_requests = 32
groups_per_collection = 4
samples_per_prompt = 2
max_response_tokens = 6

[async]
max_staleness = 1

[reward]
verifier = "letters:score"
workers = 1

[core]
lr = 1e-3
activation_checkpointing = false
max_tokens_per_gpu = 4096
max_updates = 8

[checkpoint]
every_updates = 2

[evaluation]
every_updates = 4

[evaluation.sets.held]
prompts = "{made}/holdout.jsonl"

[session]
retries = 2
retry_backoff = "0.2s"

[health]
interval = "1s"

[output]
root = "run"
export_hf = true

[tracking]
mode = "disabled"
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "laptop"
    laptop.make(folder, seed=3, prompts=280, holdout=8, warm_up_until=None)
    return folder


FOLDERS = pytest.StashKey[list[Path]]()
KEPT = Path(tempfile.gettempdir()) / "milepost-e2e-failed"
"""Run folders of tests that failed, one folder per failure; the failure names it."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what a failed test leaves, as it is at that moment, before anything is taken down."""
    report = yield
    if report.failed and call.when == "call":
        for folder in item.stash.get(FOLDERS, []):
            report.sections.append(("run folder", f"kept in {keep(folder, item.name)}"))
    return report


def keep(folder: Path, name: str) -> Path:
    """Copy a run folder, its attempts' logs among it; what is being written may be missed."""
    KEPT.mkdir(exist_ok=True)
    to = Path(tempfile.mkdtemp(prefix=f"{name[:40]}-", dir=KEPT))
    with contextlib.suppress(shutil.Error, OSError):
        shutil.copytree(folder, to / folder.name, symlinks=True, ignore=_sockets)
    return to / folder.name


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


@pytest.fixture
def make_run(made: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Make a run in a short folder of its own; every process of it is gone afterwards."""
    folders = request.node.stash[FOLDERS] = []

    def make(*sets: str) -> Run:
        folder = Path(tempfile.mkdtemp(prefix="mpe2e-"))
        folders.append(folder)
        (folder / "letters.py").write_text(VERIFIER)
        (folder / "run.toml").write_text(RUN_FILE.format(made=made))
        return Run(file=folder / "run.toml", made=made, sets=sets)

    before = scratch()
    yield make
    leftover = scratch() - before
    left = [p for folder in folders for p in processes_of(folder / "run" / "attempts")]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=20)
    if os.environ.get("MILEPOST_KEEP_E2E") != "1":
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    assert left == []
    # A folder whose owner lives belongs to somebody else's run.
    assert not [folder for folder in sweep(scratch_root()) if str(folder) in leftover]


def scratch() -> set[str]:
    """Snapshot folders in memory, of anybody on this machine."""
    return {str(folder) for folder in scratch_root().glob("milepost-*")}


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()
