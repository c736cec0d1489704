"""The owner of a real child process: start, murder, stop, and its own death."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.errors import EngineDead, WaitTimeout
from tests.contracts.tiny_models import save_model, tiny_qwen3

GONE_S = 30.0

# Each start imports torch: 4 s on a quiet core, several times that on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(save_model(tiny_qwen3(0), tmp_path_factory.mktemp("model")))


@pytest.fixture
def own(folder: str, tmp_path: Path) -> Iterator[Callable[..., EmbeddedOwner]]:
    made: list[EmbeddedOwner] = []

    def make(model_path: str = folder, **fields: float) -> EmbeddedOwner:
        settings = EngineSettings(model_path=model_path, weight_version="e1.u0", api_key="s3cret")
        made.append(
            EmbeddedOwner(slot=3, settings=settings, log_path=str(tmp_path / "log"), **fields)
        )
        return made[-1]

    yield make
    for owner in made:
        owner.stop()


def get(url: str) -> dict[str, object]:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer s3cret"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def test_life_of_an_owner(own: Callable[..., EmbeddedOwner]):
    owner = pickle.loads(pickle.dumps(own()))  # it travels into its actor before it starts
    assert not owner.is_running()
    first = owner.start()
    try:
        assert owner.is_running()
        assert get(first.url + "/model_info")["weight_version"] == "e1.u0"
        child = psutil.Process(first.pid)
        assert "s3cret" not in " ".join(child.cmdline())
        assert child.environ()["OMP_NUM_THREADS"] == "1"

        os.kill(first.pid, signal.SIGKILL)
        psutil.wait_procs([child], GONE_S)
        assert not owner.is_running()

        second = owner.start()
        assert second.incarnation != first.incarnation
        assert (second.slot, second.pid != first.pid) == (3, True)
        survivor = psutil.Process(second.pid)
        owner.stop()
        owner.stop()
        assert not owner.is_running()
        assert not survivor.is_running()
    finally:
        owner.stop()


def test_the_server_ends_with_its_owner_however_that_ends(folder: str):
    script = (
        "import sys, time\n"
        "from runtime.engines.embedded.owner import EmbeddedOwner\n"
        "from runtime.engines.embedded.settings import EngineSettings\n"
        f"owner = EmbeddedOwner(slot=0, settings=EngineSettings(model_path={folder!r}))\n"
        "print(owner.start().pid, 'torch' in sys.modules, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )
    assert process.stdout is not None
    pid, has_torch = process.stdout.readline().split()
    server = psutil.Process(int(pid))
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs([server], GONE_S)
    assert not alive
    assert has_torch == b"False"  # the owner's process stays small


def test_a_server_that_cannot_start_is_dead_with_the_end_of_its_log(
    own: Callable[..., EmbeddedOwner], tmp_path: Path
):
    owner = own(str(tmp_path / "nothing-here"))
    with pytest.raises(EngineDead, match="nothing-here"):
        owner.start()
    assert not owner.is_running()


def test_a_start_past_its_deadline_names_the_wait_and_leaves_nothing(
    own: Callable[..., EmbeddedOwner],
):
    owner = own(start_deadline_s=0.0)
    with pytest.raises(WaitTimeout, match="slot 3"):
        owner.start()
    assert not owner.is_running()
