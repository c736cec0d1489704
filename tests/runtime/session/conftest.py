import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runtime.rundir import atomic
from runtime.rundir.attempt import AttemptFile
from runtime.rundir.chain import Chain
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.rundir.records import EndRecord, Record
from tests.runtime.session.written_run import Run

DUMMY = Path(__file__).with_name("dummy_session.py")
LEASE_S = 1.2


@pytest.fixture
def root(tmp_path: Path) -> RunRoot:
    root = RunRoot.of(tmp_path / "run")
    root.create()
    return root


@pytest.fixture
def run(root: RunRoot) -> Run:
    """A run directory to be written by hand."""
    return Run(root)


@pytest.fixture
def attempt(root: RunRoot) -> Callable[..., AttemptDir]:
    """Make attempt n of the dummy session; keywords are what the dummy is asked."""

    def make(
        number: int = 1, *, grace_s: float = 30.0, lease_s: float = LEASE_S, **asked: object
    ) -> AttemptDir:
        folder = root.attempt(number)
        folder.path.mkdir(exist_ok=True)
        spec = AttemptFile(
            run="test",
            training_digest="t",
            session=(sys.executable, str(DUMMY)),
            env={"DUMMY": json.dumps({"updates": 3, **asked}), "PYTHONPATH": str(Path.cwd())},
            lease_s=lease_s,
            grace_s=grace_s,
        )
        atomic.write_bytes(folder.attempt, spec.encode())
        return folder

    return make


@pytest.fixture
def records(root: RunRoot) -> Callable[[], tuple[Record, ...]]:
    """The chain, read anew."""
    return lambda: Chain(root).read()


@pytest.fixture
def last_end(records: Callable[[], tuple[Record, ...]]) -> Callable[[], EndRecord]:
    """The last record, which is an end."""

    def read() -> EndRecord:
        end = records()[-1]
        assert isinstance(end, EndRecord)
        return end

    return read


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session looks often whether it is to end."""
    from runtime.session import sequence

    monkeypatch.setattr(sequence, "_WATCH_S", 0.01)


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """No process that names this test's folder outlives it."""
    yield
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and any(str(tmp_path) in a for a in process.cmdline()):
                left.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        process.kill()
    assert not alive, [p.info for p in alive]
