"""P4: tokens/s and CPU through the producer against a closed-loop client at the same engine.

The engine is a scripted HTTP server in a process of its own: it answers with ready-made responses
at a given total token rate, so that what differs between the two sides is this process. Sides
alternate (A B A B); CPU is this process's user and system time. The judge answers at once: real
verifiers have processes of their own and are measured elsewhere.

A side has a fixed number of responses, at least five times as many as are in flight at once, and
its time is that from the first request to the last response. A fixed time would count whole batches
only where responses of one length run, and end, together.

    python benchmarks/bench_producer.py --seconds 3 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.clock import SystemClock
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import Prompt, PromptId
from runtime.engines.client import HttpEngineClient
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import (
    EngineAddress,
    EngineInfo,
    GenerateRequest,
    SamplingSettings,
)
from runtime.policy import PolicyId
from runtime.rewards.budget import SkipBudget
from runtime.rollout.functions import SingleTurn
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.parts import ProducerParts
from runtime.rollout.producer import Producer
from runtime.rollout.settings import ProducerSettings

INFO = EngineInfo(
    version="scripted", vocab_size=50_000, context_length=4096, max_running_requests=1024,
    native_spans=True, takes_salt=True, update_bracket=False,
)  # fmt: skip
PROMPT_IDS = tuple(range(100, 228))
LEAST_BATCHES = 5
STUCK_S = 120.0


# --- The engine -----------------------------------------------------------------------------------


class Rate:
    """Spreads answers so that all of them together make at most ``tokens_per_s``."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._free_at = 0.0

    def delay(self, tokens: int) -> float:
        """Seconds until a request of so many tokens is done."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + tokens / self._tokens_per_s
        return self._free_at - now


def ready_made(n: int, tokens: int) -> bytes:
    """The body of an answer; VERSION stands where the policy goes."""
    ids = [200 + i % 1000 for i in range(tokens)]
    meta: dict[str, Any] = {
        "id": "x",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(PROMPT_IDS),
        "cached_tokens": 0,
        "weight_version": "VERSION",
        "output_token_logprobs": [[-0.693147, t, None] for t in ids],
        "weight_versions": [{"version": "VERSION", "start": 0, "end": tokens}],
    }
    samples = [{"text": "", "output_ids": ids, "meta_info": meta}] * n
    return json.dumps(samples if n > 1 else samples[0]).encode()


async def serve(tokens_per_s: float, tokens: int) -> None:
    """Serve until stdin closes; prints the port."""
    rate = Rate(tokens_per_s)
    bodies: dict[int, bytes] = {}

    async def generate(http: web.Request) -> web.Response:
        request = json.loads(await http.read())
        n = request["sampling_params"]["n"]
        if n not in bodies:
            bodies[n] = ready_made(n, tokens)
        await asyncio.sleep(rate.delay(n * tokens))
        body = bodies[n].replace(b"VERSION", request["extra_key"].encode())
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=60)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


# --- The two sides --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload."""

    concurrency: int
    """Samples in flight."""
    n: int
    """Samples of a group."""
    tokens: int
    per_sample: bool
    """One request for each sample, as with seeds; otherwise one for the group."""
    batches: int = LEAST_BATCHES
    """Samples of one side and round, in times of ``concurrency``."""

    @property
    def groups(self) -> int:
        """Of one side and round; samples in flight are whole groups too."""
        return self.batches * (self.concurrency // self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One side, one round."""

    requests: int
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        """From the first request to the last response."""
        return self.tokens / self.wall_s

    @property
    def cpu_us_per_request(self) -> float:
        """Of this process, client included."""
        return 1e6 * self.cpu_s / self.requests


@asynccontextmanager
async def _client(url: str, given: HttpEngineClient | None) -> AsyncGenerator[HttpEngineClient]:
    """The one that is given, which stays open, or one of our own."""
    if given is not None:
        yield given
        return
    async with HttpEngineClient(url) as client:
        yield client


async def closed_loop(url: str, shape: Shape, *, client: HttpEngineClient | None = None) -> Reading:
    """The client straight at the engine: as many requests at once, nothing else.

    ``client``: of an engine that is not scripted; its responses run to their cap.
    """
    n = 1 if shape.per_sample else shape.n
    sampling = SamplingSettings(max_new_tokens=shape.tokens, ignore_eos=client is not None)
    requests = shape.groups * shape.n // n
    left = iter(range(requests))
    async with _client(url, client) as client:

        async def ask() -> None:
            for number in left:  # shared: each worker takes the next one
                request = GenerateRequest(
                    rid=f"{number}", input_ids=PROMPT_IDS, sampling=sampling, n=n, salt="e1.u0"
                )
                await client.generate(request, deadline_s=600)

        began, cpu = time.monotonic(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(shape.concurrency // n):
                tasks.start_soon(ask)
        return Reading(
            requests=requests,
            tokens=requests * n * shape.tokens,
            wall_s=time.monotonic() - began,
            cpu_s=time.process_time() - cpu,
        )


class Instant:
    """A judge that costs nothing."""

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        """Half right."""
        return [float(i % 2) for i in range(len(texts))]


def prompt(prompt_id: PromptId) -> Prompt:
    """Every prompt has the same tokens."""
    return Prompt(id=prompt_id, token_ids=PROMPT_IDS, text="", answer=None, verifier="none")


async def through_producer(
    url: str, shape: Shape, *, client: HttpEngineClient | None = None
) -> Reading:
    """Ledger, admission, routing, gate, spans, validation, rewards, buffer, collections."""
    is_scripted = client is None
    async with _client(url, client) as client:
        clock = SystemClock()
        pool = EnginePool(1, clock=clock)
        info = INFO if is_scripted else await client.info()
        pool.joined(EngineAddress(slot=0, incarnation="a", url=url, pid=1), info, client)
        ledger = Ledger(PromptOrder(shape.groups, shuffle=False))
        groups = max(1, shape.concurrency // shape.n // 2)
        settings = ProducerSettings(
            epoch=1,
            vocab_size=info.vocab_size,
            groups_per_collection=groups,
            samples_per_prompt=shape.n,
            max_concurrent_samples=shape.concurrency,
            max_staleness=8,
            sampling=SamplingSettings(
                max_new_tokens=shape.tokens,
                seed=1 if shape.per_sample else None,
                ignore_eos=not is_scripted,
            ),
        )
        parts = ProducerParts(
            ledger=ledger,
            prompt=prompt,
            pool=pool,
            gate=AdmissionGate(clock=clock),
            function=SingleTurn(decode=lambda ids: ""),
            judge=Instant(),
            budget=SkipBudget(0.0, 1),
        )
        producer = Producer(settings, parts)
        taken = 0

        async def train() -> None:
            nonlocal taken
            update = 0
            while True:
                policy = PolicyId(1, update)
                pool.mark_verified(0, "a", policy)
                pool.serve(policy)
                producer.published(policy)
                collection = await producer.take(groups, policy, no_progress_s=STUCK_S)
                if collection is None:
                    return
                taken += len(collection.groups)
                update += 1
                ledger.consume([(g.prompt.id, g.attempt) for g in collection.groups], update)
                producer.consumed(collection.groups)

        began, cpu = time.monotonic(), time.process_time()
        async with anyio.create_task_group() as tasks:
            await tasks.start(producer.run)
            await train()
            wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
            await producer.close()
            tasks.cancel_scope.cancel()
        assert taken == shape.groups
    return Reading(
        requests=taken * (shape.n if shape.per_sample else 1),
        tokens=taken * shape.n * shape.tokens,
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


# --- Comparison -----------------------------------------------------------------------------------

Side = Callable[[str, Shape], Awaitable[Reading]]


def compare(url: str, shape: Shape, *, rounds: int) -> dict[str, object]:
    """Alternate the sides; medians, and the ratio round by round."""
    sides: dict[str, Side] = {"direct": closed_loop, "producer": through_producer}
    readings: dict[str, list[Reading]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            readings[name].append(uvloop.run(_run(side, url, shape)))
    ratios = [
        b.tokens_per_s / a.tokens_per_s
        for a, b in zip(readings["direct"], readings["producer"], strict=True)
    ]
    return {
        "concurrency": shape.concurrency,
        "samples_per_request": 1 if shape.per_sample else shape.n,
        "tokens_per_sample": shape.tokens,
        "batches": shape.batches,
        "tokens_per_s_ratio": statistics.median(ratios),
        "tokens_per_s_ratio_spread": [min(ratios), max(ratios)],
        **{name: _medians(readings[name]) for name in sides},
    }


async def _run(side: Side, url: str, shape: Shape) -> Reading:
    return await side(url, shape)


def _medians(readings: list[Reading]) -> dict[str, float]:
    return {
        "tokens_per_s": statistics.median(r.tokens_per_s for r in readings),
        "requests_per_s": statistics.median(r.requests / r.wall_s for r in readings),
        "cpu_us_per_request": statistics.median(r.cpu_us_per_request for r in readings),
        "cores": statistics.median(r.cpu_s / r.wall_s for r in readings),
    }


def main() -> None:
    """Run the comparison and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="be the engine (used internally)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a side and round, or more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-s", type=float, default=35_000.0)
    parser.add_argument("--tokens", type=int, default=128, help="of one response")
    parser.add_argument("--samples", type=int, default=8, help="of one group")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--per-sample", action="store_true", help="one request for each sample")
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.tokens_per_s, arguments.tokens))
        return
    command = [sys.executable, __file__, "--serve", "--tokens", str(arguments.tokens)]
    command += ["--tokens-per-s", str(arguments.tokens_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        url = f"http://127.0.0.1:{int(engine.stdout.readline())}"
        wanted = arguments.seconds * arguments.tokens_per_s / arguments.tokens
        load_before = os.getloadavg()[0]
        rows = [
            compare(
                url,
                Shape(
                    concurrency=concurrency, n=arguments.samples, tokens=arguments.tokens,
                    per_sample=arguments.per_sample,
                    batches=max(LEAST_BATCHES, math.ceil(wanted / concurrency)),
                ),
                rounds=arguments.rounds,
            )
            for concurrency in arguments.concurrency
        ]  # fmt: skip
        engine.communicate()
    print(
        json.dumps(
            {
                "benchmark": "P4 producer path",
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "python": platform.python_version(),
                "rounds": arguments.rounds,
                "load_before": load_before,
                "tokens_per_s_of_engine": arguments.tokens_per_s,
                "shapes": rows,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
