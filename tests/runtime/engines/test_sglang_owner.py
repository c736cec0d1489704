"""The owner of a real SGLang server: its start, its deaths, and what never reaches the server."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch

from runtime.engines.client import HttpEngineClient
from runtime.engines.keepalive import CLIENT_KEEPALIVE_S
from runtime.engines.protocol import EngineAddress, GenerateRequest, SamplingSettings
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.process_group import members
from runtime.errors import (
    ConfigError,
    ContractViolation,
    EngineDead,
    EngineRefused,
    PartialWrite,
    TransportError,
    WaitTimeout,
)
from runtime.policy import PolicyId
from tests.contracts.lane import LANE
from tests.contracts.sglang_engine import KEY, PYTHON, need_environment, owner_of
from tests.contracts.tiny_models import VOCAB, save_model, tiny_qwen3

# A start imports much: 15 s on a quiet core, several times that on a busy machine.
pytestmark = [pytest.mark.sglang, LANE.timeout(600)]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_environment()
    torch.set_num_threads(1)
    tiny = tiny_qwen3(0, **LANE.shape).to(LANE.dtype)
    return save_model(tiny, tmp_path_factory.mktemp("model"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture
def owner(model: Path, log: Path) -> Iterator[SglangOwner]:
    made = owner_of(model, log)
    yield made
    made.stop()


@asynccontextmanager
async def client_of(address: EngineAddress) -> AsyncGenerator[HttpEngineClient]:
    async with HttpEngineClient(address.url, api_key=KEY) as client:
        await client.info()
        yield client


def request(*ids: int, **fields: int) -> GenerateRequest:
    sampling = SamplingSettings(max_new_tokens=fields.pop("max_new_tokens", 4), ignore_eos=True)
    return GenerateRequest(rid="r", input_ids=ids, sampling=sampling, salt="e1.u0")


def until_seen_dead(owner: SglangOwner) -> None:
    """It is asked again and again; the test's own timeout bounds it."""
    while owner.is_running():
        time.sleep(0.01)


def words(log: Path) -> str:
    return log.read_text(errors="replace")


def left(address: EngineAddress) -> list[int]:
    return [m.pid for m in members(address.pid) if not m.is_zombie]


def worker(address: EngineAddress, title: str) -> int:
    return next(m.pid for m in members(address.pid) if m.title.startswith(title))


@pytest.mark.anyio
async def test_what_would_end_the_server_is_refused_before_it_leaves(
    owner: SglangOwner, model: Path, log: Path, tmp_path: Path
):
    torn = tmp_path / "torn"
    torn.mkdir()
    address = owner.start()
    async with client_of(address) as client:
        for bad in (VOCAB, 99999, -1):
            with pytest.raises(ContractViolation, match="outside the vocabulary"):
                await client.generate(request(1, bad), deadline_s=30)
        for body in (b"AAAA", pickle.dumps([1]), b"\x00" * 40):
            with pytest.raises(ContractViolation, match="safetensors"):
                await client.update_from_tensors(body, policy=PolicyId(1, 1), flush=False)
        (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1])
        with pytest.raises(PartialWrite, match=r"model\.safetensors"):
            await client.update_from_disk(str(torn), PolicyId(1, 1), flush=True)
        await client.pause("retract")
        with pytest.raises(EngineRefused, match="flush after a retracting pause"):
            await client.update_from_disk("/nowhere", PolicyId(1, 1), flush=True)
        with pytest.raises(EngineRefused, match="nothing may run"):
            await client.release_memory()
        await client.resume()
        assert await client.is_alive(timeout_s=30)
        assert owner.is_running()

        # The same id without our client in between: the server ends, and its owner says so.
        body = b'{"input_ids": [1, 99999], "sampling_params": {"max_new_tokens": 1}}'
        with pytest.raises(TransportError):
            await client._http.send("POST", "/generate", body)
    until_seen_dead(owner)
    assert ("IndexError" if LANE.device == "cpu" else "device-side assert") in words(log)
    owner.stop()
    assert left(address) == []


@pytest.mark.anyio
async def test_a_killed_scheduler_is_seen_at_once_and_a_frozen_one_by_its_probe(
    model: Path, log: Path
):
    made = owner_of(model, log, keepalive_s=30.5)
    owner = pickle.loads(pickle.dumps(made))  # it travels before it starts
    try:
        await _lives_and_dies(owner)
    finally:
        owner.stop()
    assert KEY not in words(log)


async def _lives_and_dies(owner: SglangOwner) -> None:
    address = owner.start()
    assert owner.is_running()
    assert KEY not in " ".join(psutil.Process(address.pid).cmdline())

    os.kill(worker(address, "sglang::scheduler"), signal.SIGKILL)
    until_seen_dead(owner)

    second = owner.start()
    assert left(address) == []
    assert second.incarnation != address.incarnation
    async with client_of(second) as client:
        assert await client.is_alive(timeout_s=30)
        _, facts = await client._http.send("GET", "/milepost", None)
        assert facts["keepalive_s"] == 31  # whole seconds, never fewer
        _, server = await client._http.send("GET", "/server_info", None)
        frozen = worker(second, "sglang::scheduler")
        # Its store listens on the port that its launcher held for it, and on no other.
        listens = psutil.Process(frozen).net_connections("inet")
        assert server["nccl_port"] in {c.laddr.port for c in listens if c.status == "LISTEN"}
        os.kill(frozen, signal.SIGSTOP)
        assert owner.is_running()  # a frozen process is there: only a probe can tell
        assert not await client.is_alive(timeout_s=3)
    owner.stop()
    assert left(second) == []


def test_the_servers_processes_end_with_their_owner_however_that_ends(model: Path, log: Path):
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from tests.contracts.sglang_engine import owner_of\n"
        f"print(owner_of(Path({str(model)!r}), Path({str(log)!r})).start().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH"))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().isdigit():
            break
    pid = int(line)
    assert len(members(pid)) >= 3
    process.kill()
    process.wait()
    process.stdout.close()
    while any(not m.is_zombie for m in members(pid)):  # the test's own timeout bounds it
        time.sleep(0.1)


def test_a_server_that_would_close_connections_still_in_use_is_not_started(model: Path, log: Path):
    racing = owner_of(model, log, keepalive_s=CLIENT_KEEPALIVE_S)
    with pytest.raises(ConfigError, match="equal values race"):
        racing.start()
    assert not log.exists()


def test_a_server_that_cannot_start_is_dead_with_its_last_words(model: Path, log: Path):
    unknown = owner_of(model, log, no_such_argument=1)
    with pytest.raises(EngineDead, match="no-such-argument"):
        unknown.start()
    assert not unknown.is_running()

    nowhere = owner_of(model / "nothing-here", log)
    with pytest.raises(EngineDead, match="nothing-here"):
        nowhere.start()

    no_python = owner_of(model, log, python=str(PYTHON) + "-not")
    with pytest.raises(EngineDead, match=re.escape(f"{PYTHON}-not could not be run")):
        no_python.start()


def test_a_start_past_its_deadline_says_how_far_it_came_and_leaves_nothing(
    owner: SglangOwner,
):
    owner.start_deadline_s = 3.0
    with pytest.raises(WaitTimeout, match=r"slot 0 to generate|slot 0 exited"):
        owner.start()
    assert not owner.is_running()
