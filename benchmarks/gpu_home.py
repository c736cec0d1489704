"""A trainer and an engine that share one GPU, without Ray or a session: for ``gpu_refresh``."""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import torch

from benchmarks.bench_producer import Shape, closed_loop, through_producer
from runtime.clock import SystemClock
from runtime.engines.client import HttpEngineClient
from runtime.engines.embedded.owner import EmbeddedOwner
from runtime.engines.embedded.settings import EngineSettings
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, GenerateRequest, SamplingSettings
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings
from runtime.policy import PolicyId
from runtime.publication.decision import Decision
from runtime.publication.disk import DiskTransport
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import Target
from runtime.publication.transaction import Publisher
from runtime.trainer.local import LocalGroup
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings


class Home:
    """What every part of the benchmark works with; make it with ``make``."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.pause = arguments.pause
        self.seen: tuple[Any, Any] = ([], {})
        """What a run under fire left: collections, and the weights of each policy."""
        self.clock = SystemClock()
        self.pool = EnginePool(1, clock=self.clock)
        self.decisions: list[Decision] = []
        self.start_s: list[float] = []
        self.owner = _owner(arguments, folder)
        on_gpu = torch.cuda.is_available()
        self.trainer = LocalGroup(
            TrainerSettings(
                loss=LossSettings.named("dapo"),
                optimizer=OptimizerSettings(lr=1e-5),
                dtype="bfloat16" if on_gpu else "float32",
                max_mean_logprob_gap=100.0,  # measured here, span by span
            )
        )
        self.publisher: Publisher
        self.address: EngineAddress
        self.client: HttpEngineClient

    @classmethod
    async def make(cls, arguments: argparse.Namespace, folder: Path) -> Home:
        """Load the trainer beside the engine's start."""
        home = cls(arguments, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(home.trainer.load, arguments.model)
            tasks.start_soon(home.start_engine)
        opens = home.info.shares != "none"
        home.publisher = home._publisher(
            IpcTransport(home.trainer) if opens else DiskTransport(home.trainer)
        )
        return home

    async def start_engine(self) -> None:
        """Start an incarnation; it is stale until something is published to it."""
        began = time.monotonic()
        self.address = await anyio.to_thread.run_sync(self.owner.start)
        self.start_s.append(round(time.monotonic() - began, 1))
        key = self.owner.settings.api_key
        self.client = HttpEngineClient(
            self.address.url, api_key=None if key is None else key.get_secret_value()
        )
        self.info = await self.client.info()
        self.pool.joined(self.address, self.info, self.client)

    async def settle(self) -> None:
        """Nothing runs and nothing is paused, whatever was cancelled before."""
        await self.client.abort(None)
        await self.client.resume()

    async def close(self) -> None:
        """End everything."""
        await self.publisher.close()
        await self.client.close()
        await self.trainer.shutdown()
        await anyio.to_thread.run_sync(self.owner.stop)

    # --- Publishing ---------------------------------------------------------------------------

    def target(self) -> Target:
        """The engine of now."""
        return Target(slot=0, incarnation=self.address.incarnation, client=self.client)

    async def publish(self, policy: PolicyId, publisher: Publisher | None = None) -> Decision:
        """Make ``policy`` the published one and send traffic to it."""

        def decided(policy: PolicyId, targets: Any) -> None:
            self.pool.mark_verified(0, self.address.incarnation, policy)
            self.pool.serve(policy)

        decision = await (publisher or self.publisher).publish(
            policy, [self.target()], mode="refresh", decided=decided
        )
        if publisher is None:
            self.decisions.append(decision)
        return decision

    def _publisher(self, transport: Any) -> Publisher:
        async def kill(slot: int, incarnation: str, reason: str) -> None:
            raise RuntimeError(f"the engine failed in a benchmark: {reason}")

        return Publisher(
            transport=transport,
            kill=kill,
            record_path=self.folder / f"{transport.name}.jsonl",
            pause=self.pause,
        )

    async def transports(self, rounds: int, found: dict[str, Any]) -> None:
        """Publications to an idle engine, transports in turn."""
        publishers = {
            "the run's": self.publisher,
            "disk": self._publisher(DiskTransport(self.trainer)),
        }
        seen: dict[str, list[Decision]] = {name: [] for name in publishers}
        update = 10_000
        for at in range(rounds + 2):
            for name, publisher in publishers.items():
                update += 1
                decision = await self.publish(PolicyId(1, update), publisher)
                if at >= 2:  # buffers and folders are made in the first two
                    seen[name].append(decision)
                    found[name] = self.summary(seen[name])
        await publishers["disk"].close()

    def summary(self, decisions: list[Decision]) -> dict[str, Any]:
        """Medians, and the slowest pause."""
        if not decisions:
            return {}
        pauses = [d.pause_s or 0.0 for d in decisions]
        transfer = statistics.median(d.stages_s["transfer"] for d in decisions)
        return {
            "num": len(decisions),
            "num_bytes": decisions[-1].num_bytes,
            "num_tensors": decisions[-1].num_tensors,
            "pause": sorted({v.pause for d in decisions for v in d.verified}),
            "pause_s": round(statistics.median(pauses), 5),
            "pause_max_s": round(max(pauses), 5),
            "transfer_gb_per_s": round(decisions[-1].num_bytes / transfer / 1e9, 2),
            "stages_s": {
                stage: round(statistics.median(d.stages_s[stage] for d in decisions), 5)
                for stage in decisions[-1].stages_s
            },
        }

    # --- Weights of a policy ------------------------------------------------------------------

    def weights(self) -> list[torch.Tensor]:
        """A copy of what the trainer would publish now."""
        return [t.detach().clone() for _, t in self.trainer.backend._ready.weights.full_tensors()]

    def load_weights(self, kept: list[torch.Tensor]) -> None:
        """Score with these from now on; the optimizer knows nothing of it."""
        with torch.no_grad():
            for param, value in zip(self.trainer.backend._ready.weights.params, kept, strict=True):
                param.copy_(value)

    def forget(self) -> None:
        """Let the weights of past policies go: an engine that starts wants the memory."""
        self.seen = ([], {})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- Speed --------------------------------------------------------------------------------

    async def throughput(self, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
        """Tokens/s straight at the engine, and through the producer, in turn."""
        await self.publish(PolicyId(1, 1_000_000))
        concurrency = arguments.concurrency
        shape = Shape(
            concurrency=concurrency, n=8, tokens=arguments.tokens, per_sample=False,
            batches=arguments.batches,
        )  # fmt: skip
        rows: dict[str, list[float]] = {"random_prompts": [], "direct": [], "producer": []}
        for _ in range(3):
            rows["random_prompts"].append(await self._batch(concurrency, arguments.tokens))
            direct = await closed_loop(self.address.url, shape, client=self.client)
            through = await through_producer(self.address.url, shape, client=self.client)
            rows["direct"].append(direct.tokens_per_s)
            rows["producer"].append(through.tokens_per_s)
            ratios = [p / d for p, d in zip(rows["producer"], rows["direct"], strict=True)]
            found |= {
                "concurrency": concurrency,
                "batches": arguments.batches,
                "tokens_per_s": {k: [round(x) for x in v] for k, v in rows.items()},
                "producer_over_direct": round(statistics.median(ratios), 3),
            }

    async def _batch(self, concurrency: int, tokens: int) -> float:
        """One closed batch of different prompts, with log-probs, a request a sample."""
        rng = random.Random(time.time_ns())
        began = time.monotonic()

        async def one(number: int) -> int:
            ids = tuple(rng.randrange(self.info.vocab_size) for _ in range(128))
            request = GenerateRequest(
                rid=f"b{time.time_ns()}-{number}", input_ids=ids, salt="e1.u0",
                sampling=SamplingSettings(max_new_tokens=tokens, ignore_eos=True),
            )  # fmt: skip
            (answer,) = await self.client.generate(request, deadline_s=300)
            return len(answer.token_ids)

        counts = await asyncio.gather(*map(one, range(concurrency)))
        return sum(counts) / (time.monotonic() - began)

    # --- Facts --------------------------------------------------------------------------------

    def machine(self) -> dict[str, Any]:
        """Versions and the card."""
        card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
        cores = psutil.cpu_count()
        return {
            "gpu": card,
            "cores": cores,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "command": " ".join(sys.argv),
        }

    def facts(self) -> dict[str, Any]:
        """What the engine was found to be, and how long it took to start."""
        return {**asdict(self.info), "start_s": self.start_s}


def _owner(arguments: argparse.Namespace, folder: Path) -> SglangOwner | EmbeddedOwner:
    if not arguments.engine_python:
        return EmbeddedOwner(
            slot=0,
            settings=EngineSettings(model_path=arguments.model, dtype="float32"),
            log_path=_log_path(arguments, folder),
        )
    on_gpu = torch.cuda.is_available()
    settings = SglangSettings(
        model_path=arguments.model,
        python=arguments.engine_python,
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        seed=1,
        args=arguments.engine_args,
    )
    return SglangOwner(
        slot=0, settings=settings, log_path=_log_path(arguments, folder), scratch=str(folder)
    )


def _log_path(arguments: argparse.Namespace, folder: Path) -> str:
    """Beside the figures, where it outlives the run."""
    return str((arguments.out.parent if arguments.out is not None else folder) / "engine.log")
