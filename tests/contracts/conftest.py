"""The engines that the contract suite runs against.

An implementation is a function from limits to a running server: ``embedded`` in a thread of this
process, ``sglang`` as its own processes. The tests talk to a URL and know two model folders. What
one engine alone promises is marked ``only_on``, with the reason; docs/engine-contract.md lists it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch

from runtime.engines.embedded.server import Server
from runtime.engines.embedded.settings import EngineSettings
from tests.contracts.lane import LANE, OLDER
from tests.contracts.launch_worlds import (
    BACKENDS,
    SCHEDULERS,
    SECRET,
    SURROUNDINGS,
    SchedulerWorld,
    World,
    world_of,
)
from tests.contracts.sglang_engine import KEY, SharedServers, need_environment
from tests.contracts.tiny_models import save_model, tiny_qwen3


@dataclass
class Models:
    """Two sets of weights of one shape: ``a`` is served first."""

    folders: dict[str, Path]
    models: dict[str, Any] = field(repr=False)


@dataclass
class Answer:
    status: int
    body: Any
    """Parsed JSON, or text."""


@dataclass
class RunningEngine:
    """One server under test."""

    url: str
    api_key: str | None = None
    kind: str = "embedded"
    version: str = ""
    """Of an SGLang server."""

    @property
    def tells_spans(self) -> bool:
        """Which weights drew which token; a server that does not has no update sessions either."""
        return self.version not in OLDER

    @property
    def names_unknown_fields(self) -> bool:
        """A sampling parameter that it does not know is refused by name."""
        return self.version not in OLDER

    async def call(self, method: str, path: str, body: object = None) -> Answer:
        raw = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **self._headers()}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, self.url + path, data=raw, headers=headers) as response,
        ):
            content = await response.read()
            is_json = response.content_type == "application/json"
            return Answer(response.status, orjson.loads(content) if is_json else content.decode())

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    async def post(self, path: str, body: object = None) -> Answer:
        return await self.call("POST", path, {} if body is None else body)

    async def get(self, path: str) -> Answer:
        return await self.call("GET", path)

    async def until(self, *, waiting: int, running: int) -> None:
        """Until that many requests wait and run; the test's own timeout bounds it."""
        while True:
            (load,) = (await self.get("/v1/loads")).body["loads"]
            if (load["num_waiting_reqs"], load["num_running_reqs"]) == (waiting, running):
                return
            await asyncio.sleep(0)

    @asynccontextmanager
    async def stream(self, body: dict[str, object]) -> AsyncGenerator[Stream]:
        """A streaming call under way; leaving the block drops the connection."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.post(
                self.url + "/generate", json={**body, "stream": True}, headers=self._headers()
            ) as response,
        ):
            yield Stream(response)


class Stream:
    """Server-sent events of one call."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self._response = response
        self.is_over = False

    async def next(self) -> Any:
        """The next event; None at [DONE]."""
        line = (await self._response.content.readuntil(b"\n\n")).strip()
        if line == b"data: [DONE]":
            self.is_over = True
            return None
        return orjson.loads(line.removeprefix(b"data: "))

    async def tokens(self, count: int) -> Any:
        """The first event with at least ``count`` tokens."""
        while True:
            event = await self.next()
            if len(event["output_ids"]) >= count:
                return event

    async def rest(self) -> list[Any]:
        """All events up to [DONE]."""
        events: list[Any] = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events

    async def last(self) -> Any:
        """The last event before [DONE]."""
        return (await self.rest())[-1]


class ServerThread:
    """A server with an event loop of its own in a thread of this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._ready: Future[Server] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with Server(self._settings) as server:
                self._ready.set_result(server)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    def __enter__(self) -> Server:
        self._thread.start()
        return self._ready.result(30)

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def embedded(models: Models, **limits: Any) -> Iterator[RunningEngine]:
    settings = EngineSettings(model_path=str(models.folders["a"]), **limits)
    with ServerThread(settings) as server:
        key = settings.api_key.get_secret_value() if settings.api_key else None
        yield RunningEngine(server.url, key)


ENGINES = ("embedded", pytest.param("sglang", marks=(pytest.mark.sglang, LANE.timeout(400))))


def only_on(kind: str, because: str) -> pytest.MarkDecorator:
    """The test is about one engine; ``because`` says what the other does."""
    return pytest.mark.only_on(kind, because)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    made = {name: tiny_qwen3(seed, **LANE.shape) for seed, name in enumerate("ab")}
    folders = {
        name: save_model(model.to(LANE.dtype), tmp_path_factory.mktemp(f"model_{name}"))
        for name, model in made.items()
    }
    # What is expected of them is computed in float32, from what was written.
    return Models(folders, {name: model.float() for name, model in made.items()})


_SERVERS = pytest.StashKey[SharedServers]()


@pytest.fixture(scope="session")
def sglang_servers(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    need_environment()
    servers = SharedServers(models.folders["a"], tmp_path_factory.mktemp("sglang"))
    request.config.stash[_SERVERS] = servers
    yield servers
    servers.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the servers with the last test of this folder: an idle one takes a third of a core."""
    is_last = nextitem is None or Path(__file__).parent not in nextitem.path.parents
    if is_last and (servers := item.config.stash.get(_SERVERS, None)) is not None:
        servers.close()


@pytest.fixture(params=ENGINES)
def start_engine(
    request: pytest.FixtureRequest, models: Models
) -> Callable[..., AbstractContextManager[RunningEngine]]:
    """Start a server with limits of one's own: ``with start_engine(max_queued_requests=2)``."""
    kind: str = request.param
    marker = request.node.get_closest_marker("only_on")
    if marker is not None and marker.args[0] != kind:
        pytest.skip(f"on {marker.args[0]} only: {marker.args[1]}")
    if kind == "embedded":
        return lambda **limits: embedded(models, **limits)
    servers: SharedServers = request.getfixturevalue("sglang_servers")

    @contextmanager
    def lend(**limits: Any) -> Iterator[RunningEngine]:
        with servers.lend(**limits) as lent:
            yield RunningEngine(lent.url, KEY, kind, lent.version)

    return lend


@pytest.fixture
def engine_server(start_engine: Callable[..., Any]) -> Iterator[RunningEngine]:
    """A fresh server with ordinary limits, weights ``a``."""
    with start_engine() as engine:
        yield engine


@pytest.fixture(params=BACKENDS)
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A backend to launch with; what surrounds its submitter belongs into no job."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("SLURM_JOB_NODELIST", SURROUNDINGS)
    with world_of(request.param, tmp_path, monkeypatch) as world:
        yield world


@pytest.fixture(params=SCHEDULERS)
def scheduler(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SchedulerWorld]:
    """A backend with a scheduler behind it."""
    with world_of(request.param, tmp_path, monkeypatch) as world:
        assert isinstance(world, SchedulerWorld)
        yield world
