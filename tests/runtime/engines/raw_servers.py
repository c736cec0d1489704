"""Servers that answer with raw bytes, and a client of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import orjson

from runtime.engines.client import HttpEngineClient
from runtime.engines.protocol import GenerateRequest, SamplingSettings


def request(ids: tuple[int, ...] = (1, 2, 3), max_new: int = 4, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"rid": "r", **changes}
    sampling = SamplingSettings(max_new_tokens=max_new, ignore_eos=True)
    return GenerateRequest(input_ids=ids, sampling=sampling, **fields)


class RawServer:
    """Counts requests and answers each with raw bytes; empty bytes close the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.num_requests = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            size = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
            await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
            self.num_requests += 1
            answer = self.answers.pop(0) if self.answers else b""
            if not answer:
                break
            writer.write(answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncGenerator[RawServer]:
    made = RawServer(*answers)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    async with server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def http(status: int, body: object, kind: str = "application/json") -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def running(made: HttpEngineClient, count: int) -> None:
    """Until ``count`` requests run; the test's own timeout bounds it."""
    while True:
        if (await made.load()).running == count:
            return
        await asyncio.sleep(0)


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncGenerator[HttpEngineClient]:
    async with HttpEngineClient(url, **options) as made:
        yield made
