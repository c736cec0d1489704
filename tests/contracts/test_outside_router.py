"""A real sglang-router in front of engines: what its workers API does, and how our client reads it.

Milepost routes by itself and needs none. Who puts one in front has to know which of its answers a
group may be retried for, and that it must not try a generation again on its own.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.held_port import HeldPort
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.errors import RunError, TransportError, UnavailableError
from tests.contracts.conftest import Models, ServerThread
from tests.contracts.sglang_engine import KEY, PYTHON, need_environment
from tests.contracts.tiny_models import VOCAB

pytestmark = [pytest.mark.sglang, pytest.mark.anyio, pytest.mark.timeout(300)]

AS_DOCUMENTED = ("--disable-retries", "--disable-circuit-breaker", "--disable-health-check")
"""docs/engine-contract.md says why each."""


class Router:
    """One router process, and its control plane."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._process = process

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body, headers=headers) as answer,
        ):
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def until_up(self) -> None:
        """Until it answers; the test's own timeout bounds it."""
        while self._process.poll() is None:
            try:
                if (await self.call("GET", "/liveness"))[0] == 200:
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
        raise AssertionError("the router ended before it answered")

    async def workers(self) -> dict[str, Any]:
        """Its workers by URL."""
        return {w["url"]: w for w in (await self.call("GET", "/workers"))[1]["workers"]}

    async def add(self, url: str) -> None:
        """Add a worker and wait until it is one: the router answers before that."""
        status, _ = await self.call("POST", "/workers", {"url": url, "api_key": KEY})
        assert status == 202
        while not (await self.workers()).get(url, {}).get("is_healthy"):
            pass  # each look is a call; the test's own timeout bounds them

    async def remove(self, url: str) -> str:
        """Remove a worker and wait until it is none; returns the id it had."""
        worker = (await self.workers())[url]["id"]
        assert (await self.call("DELETE", f"/workers/{worker}"))[0] == 202
        while url in await self.workers():
            pass
        return worker

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[HttpEngineClient]:
        async with HttpEngineClient(self.url, api_key=KEY, vocab_size=VOCAB) as client:
            yield client


def start(*arguments: str) -> tuple[str, subprocess.Popen[bytes]]:
    with HeldPort() as port, HeldPort() as metrics:
        command = [str(PYTHON), "-m", "sglang_router.launch_router", *arguments]
        command += ["--host", "127.0.0.1", "--port", str(port.port), "--policy", "round_robin"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics.port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Both ports are its own once it listens on them; until then they are held.
        for number in (port.port, metrics.port):
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", number), timeout=20).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
    return f"http://127.0.0.1:{port.port}", process


@contextmanager
def running(*arguments: str) -> Iterator[Router]:
    need_environment()
    url, process = start(*arguments)
    try:
        yield Router(url, process)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def shared() -> Iterator[Router]:
    """Its start imports much: one process for the module."""
    with running(*AS_DOCUMENTED) as router:
        yield router


@pytest.fixture
async def router(shared: Router) -> Router:
    """Without workers."""
    await shared.until_up()
    for url in await shared.workers():
        await shared.remove(url)
    return shared


class Broken:
    """A worker that loses each request it gets: before its answer, or within."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.num_generations = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
                await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
                if b"/generate " in head:
                    self.num_generations += 1
                    writer.write(self._answer)
                    await writer.drain()
                    break
                facts = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n"
                writer.write(facts + b"Content-Length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


def request(rid: str = "r") -> GenerateRequest:
    sampling = SamplingSettings(max_new_tokens=3, ignore_eos=True)
    return GenerateRequest(rid=rid, input_ids=(1, 2, 3), sampling=sampling)


async def failure(router: Router) -> RunError:
    async with router.client() as client:
        with pytest.raises(RunError) as caught:
            await client.generate(request(), deadline_s=60)
    return caught.value


async def test_engines_come_and_go_and_serve_as_they_do_without_it(router: Router, models: Models):
    def engine(version: str) -> ServerThread:
        return ServerThread(
            EngineSettings(model_path=str(models.folders["a"]), api_key=KEY, weight_version=version)
        )

    assert (await router.call("GET", "/readiness"))[0] == 503
    with engine("e1.u0") as one, engine("e1.u1") as other:
        for url in (one.url, other.url, one.url):  # again: one worker all the same
            await router.add(url)
        assert set(await router.workers()) == {one.url, other.url}
        assert (await router.call("GET", "/readiness"))[0] == 200
        async with router.client() as client:
            seen = [await client.generate(request(f"r{i}"), deadline_s=60) for i in range(4)]
            policies = [str(sample.prefill) for (sample,) in seen]
            assert sorted(policies) == ["e1.u0", "e1.u0", "e1.u1", "e1.u1"]
            assert all(len(sample.token_ids) == len(sample.logprobs) == 3 for (sample,) in seen)

            gone = await router.remove(one.url)
            for i in range(3):
                (sample,) = await client.generate(request(f"s{i}"), deadline_s=60)
                assert str(sample.prefill) == "e1.u1"
        assert (await router.call("DELETE", f"/workers/{gone}"))[0] == 404


async def test_without_workers_it_is_unavailable(router: Router):
    assert isinstance(await failure(router), UnavailableError)


@pytest.mark.parametrize(
    "answer",
    [b"", b'HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"a":'],
    ids=["before its answer", "within its answer"],
)
async def test_a_lost_worker_is_a_transport_error_and_its_generation_is_not_tried_again(
    router: Router, answer: bytes
):
    broken = Broken(answer)
    async with broken.serve() as url:
        await router.add(url)
        assert isinstance(await failure(router), TransportError)
        assert broken.num_generations == 1


async def test_a_worker_that_nobody_listens_at_any_more_is_a_transport_error(router: Router):
    with HeldPort() as port:
        server = await asyncio.start_server(Broken(b"").handle, "127.0.0.1", port.port)
        await router.add(f"http://127.0.0.1:{port.port}")
        server.close()
        await server.wait_closed()
        assert isinstance(await failure(router), TransportError)


async def test_left_to_itself_it_tries_a_generation_again():
    """Why ``--disable-retries`` is asked for: a lost generation may have run."""
    with running("--disable-circuit-breaker", "--disable-health-check") as router:
        await router.until_up()
        broken = Broken(b"")
        async with broken.serve() as url:
            await router.add(url)
            assert isinstance(await failure(router), TransportError)
        assert broken.num_generations > 1
