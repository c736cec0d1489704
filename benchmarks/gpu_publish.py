"""What a publication costs, part by part (P5): by ipc on one GPU, by broadcast to another one.

The trainer is in this process, on the first GPU. Both engines are idle and started side by side.
Ways take turns: each transport with buckets in the form of our plugin, and in the engine's own.
Of every call the time here and in the server's process is told, in milliseconds.

    python -m benchmarks.gpu_publish --engine-python /opt/sglang/bin/python --out publish.json

``--engines far`` leaves the first engine out, where a model fills the card. ``--cpu`` tries it with
a tiny model and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from benchmarks.gpu_links import timed
from benchmarks.gpu_task import GPU_ARGS, make_model
from runtime.engines.client import HttpEngineClient
from runtime.engines.protocol import GenerateRequest, SamplingSettings
from runtime.engines.sglang.inside.timing import MARK
from runtime.engines.sglang.owner import SglangOwner
from runtime.engines.sglang.settings import SglangSettings
from runtime.policy import PolicyId
from runtime.publication.broadcast import BroadcastTransport
from runtime.publication.decision import Decision
from runtime.publication.ipc import IpcTransport
from runtime.publication.protocol import ONLY_SHA256, Target
from runtime.publication.transaction import Publisher
from runtime.trainer.local import LocalGroup
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings

FORMS = ("own", "engine's")
FIRE = "own form under fire"
WARM = 2
"""Publications of each way before the ones that count: buffers, groups and kernels are made."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One publication: its record, and the calls it made of the engine."""

    decision: Decision
    calls: list[tuple[str, float, float]]
    """Path, begin and end by the wall clock."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One server on a GPU of its own choice."""

    name: str
    owner: SglangOwner
    log: Path
    start_s: float = 0.0
    target: Target = field(init=False)
    client: Any = None
    """HttpEngineClient, once it runs."""
    calls: list[tuple[str, float, float]] = field(default_factory=list[Any])
    seen: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))

    async def start(self) -> None:
        """Start it and learn its facts; every call from then on is timed."""
        began = time.monotonic()
        address = await anyio.to_thread.run_sync(self.owner.start)
        self.start_s = round(time.monotonic() - began, 1)
        self.client = HttpEngineClient(address.url)
        await self.client.info()
        self.target = Target(slot=0, incarnation=address.incarnation, client=self.client)
        call = self.client._http.call

        async def told(method: str, path: str, *rest: Any) -> Any:
            began = time.time()
            try:
                return await call(method, path, *rest)
            finally:
                self.calls.append((path, began, time.time()))

        self.client._http.call = told

    async def stop(self) -> None:
        """End it, whatever it had come to."""
        if self.client is not None:
            await self.client.close()
        await anyio.to_thread.run_sync(self.owner.stop)

    @property
    def forms(self) -> tuple[str, ...]:
        """In which it takes buckets."""
        return FORMS if getattr(self.client._info, "own_buckets", False) else FORMS[1:]

    def use(self, form: str) -> None:
        """Take buckets in that form from now on."""
        if hasattr(self.client._info, "own_buckets"):
            is_own = form == "own"
            info = replace(self.client._info, own_buckets=is_own, own_broadcast=is_own)
            self.client._info = info

    def says(self) -> list[dict[str, Any]]:
        """What its process said about its part, oldest first."""
        found: list[dict[str, Any]] = []
        for path in (self.log.with_name(self.log.name + ".1"), self.log):
            for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
                with suppress(json.JSONDecodeError):  # other processes write there too
                    if MARK in line:
                        found.append(json.loads(line.partition(MARK)[2]))
        return found


class Source:
    """The trainer's sending side, with a thread in place of Ray."""

    def __init__(self, trainer: LocalGroup) -> None:
        self._trainer, self._server = trainer, trainer._server

    async def describe(self, kinds: Any = ONLY_SHA256) -> Any:
        """What a broadcast will carry."""
        return await self._trainer._step("describe", kinds)

    async def free_port(self, host: str) -> int:
        """For the store of the next group."""
        return self._server.free_port(host)

    async def open_group(self, plan: Any, timeout_s: float) -> None:
        """Join as rank 0."""
        await self._trainer._step("open_group", plan, timeout_s)

    async def send_bucket(self, *what: Any) -> None:
        """Send some buckets."""
        await self._trainer._step("send_bucket", *what)

    async def abort(self) -> None:
        """Leave the group."""
        await anyio.to_thread.run_sync(self._server.abort_broadcast)


def engine_on(arguments: argparse.Namespace, folder: Path, name: str, gpu: int) -> Engine:
    """An engine that sees that GPU alone."""
    python = folder / f"python-{name}"
    seen = "" if arguments.cpu else f"export CUDA_VISIBLE_DEVICES={gpu}\n"
    python.write_text(f'#!/bin/bash\n{seen}exec {arguments.engine_python} "$@"\n')
    python.chmod(0o755)
    out = arguments.out.parent if arguments.out is not None else folder
    log = out / f"engine-{name}.log"
    settings = SglangSettings(
        model_path=arguments.model,
        python=str(python),
        device="cpu" if arguments.cpu else "cuda",
        dtype="float32" if arguments.cpu else "bfloat16",
        seed=1,
        max_running_requests=256,
        args={"max_total_tokens": 20000}
        if arguments.cpu
        else {**GPU_ARGS, "mem_fraction_static": 0.3},
    )
    owner = SglangOwner(slot=0, settings=settings, log_path=str(log), scratch=str(folder))
    return Engine(name=name, owner=owner, log=log)


async def main_async(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; writes after each part."""
    found: dict[str, Any] = {"shape": arguments.shape, "command": " ".join(sys.argv)}
    trainer = LocalGroup(
        TrainerSettings(
            loss=LossSettings.named("dapo"),
            optimizer=OptimizerSettings(lr=1e-5),
            dtype="float32" if arguments.cpu else "bfloat16",
        )
    )
    engines = {
        name: engine_on(arguments, folder, name, gpu)
        for gpu, name in enumerate(("near", "far"))
        if name in arguments.engines.split(",")
    }
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.load, arguments.model)
            for engine in engines.values():
                tasks.start_soon(engine.start)
        found["start_s"] = {name: engine.start_s for name, engine in engines.items()}
        source = Source(trainer)
        transports: dict[str, Any] = {
            "near": lambda: IpcTransport(trainer),
            "far": lambda: BroadcastTransport(
                source, backend="gloo" if arguments.cpu else "nccl", group_timeout_s=60.0
            ),
        }
        publishers = {
            name: _publisher(transports[name](), folder / f"{name}.jsonl") for name in engines
        }
        forms = {name: engine.forms for name, engine in engines.items()}
        update = 0
        for _ in range(WARM + arguments.rounds):
            for form in FORMS:
                for name, engine in engines.items():
                    if form not in forms[name]:
                        continue
                    update += 1
                    engine.use(form)
                    await _publish(publishers[name], engine, form, PolicyId(1, update))
            _write(arguments, found | {"ways": ways(engines)})
        for name, engine in engines.items():
            for _ in range(arguments.fire):
                update += 1
                async with under_fire(engine, arguments):
                    await _publish(publishers[name], engine, FIRE, PolicyId(1, update))
                _write(arguments, found | {"ways": ways(engines)})
        for publisher in publishers.values():
            await publisher.close()
        found["ways"] = ways(engines)
    finally:
        for engine in engines.values():
            await engine.stop()
        await trainer.shutdown()
    found |= ceilings(found["ways"])
    _write(arguments, found)
    return found


@asynccontextmanager
async def under_fire(engine: Engine, arguments: argparse.Namespace) -> AsyncGenerator[None]:
    """Responses in flight, past their prompts; what is left of them is awaited afterwards."""
    rng = random.Random(time.time_ns())
    size = engine.client._info.vocab_size

    async def one(number: int) -> None:
        request = GenerateRequest(
            rid=f"f{time.time_ns()}-{number}",
            input_ids=tuple(rng.randrange(size) for _ in range(8 if arguments.cpu else 128)),
            salt="e1.u0",
            sampling=SamplingSettings(max_new_tokens=256, ignore_eos=True),
        )
        await engine.client.generate(request, deadline_s=120)

    engine.use(FORMS[0])
    async with anyio.create_task_group() as tasks:
        for number in range(arguments.concurrency):
            tasks.start_soon(one, number)
        with anyio.move_on_after(20):  # a model quick enough is never so far
            while (await engine.client.load()).running < arguments.concurrency:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        yield


async def _publish(publisher: Publisher, engine: Engine, form: str, policy: PolicyId) -> None:
    engine.calls.clear()
    decision = await publisher.publish(policy, [engine.target], mode="refresh")
    way = form if form == FIRE else f"{form} form"
    engine.seen[f"{publisher._transport.name}, {way}"].append(
        Seen(decision=decision, calls=list(engine.calls))
    )


def _publisher(transport: Any, record: Path) -> Publisher:
    async def kill(slot: int, incarnation: str, reason: str) -> None:
        raise RuntimeError(f"the engine failed in a benchmark: {reason}")

    return Publisher(transport=transport, kill=kill, record_path=record)


def ways(engines: dict[str, Engine]) -> dict[str, Any]:
    """Medians of each way, in milliseconds."""
    found: dict[str, Any] = {}
    for engine in engines.values():
        says = engine.says()
        for way, all_seen in engine.seen.items():
            if counted := all_seen[WARM:]:
                found[way] = _figures(counted, says)
    return found


def _figures(seen: list[Seen], says: list[dict[str, Any]]) -> dict[str, Any]:
    decisions = [s.decision for s in seen]
    sent_s = statistics.median(d.stages_s["transfer"] for d in decisions)
    parts: dict[str, list[float]] = defaultdict(list)
    for one in seen:
        times: dict[str, float] = defaultdict(float)
        for path, began, ended in one.calls:
            times[f"call {path}"] += ended - began
            for said in says:
                if began <= said["began_at"] <= ended:
                    times[f"in {path}: until it begins"] += said["began_at"] - began
                    times[f"in {path}: queueing work"] += said["queued_s"]
                    times[f"in {path}: until it is done"] += said["elapsed_s"]
                    times[f"in {path}: back here"] += ended - said["began_at"] - said["elapsed_s"]
        for name, value in times.items():
            parts[name].append(value)
    return {
        "num": len(seen),
        "num_bytes": decisions[-1].num_bytes,
        "num_tensors": decisions[-1].num_tensors,
        "calls": len(seen[-1].calls),
        "pause_ms": _ms([d.pause_s or 0.0 for d in decisions]),
        "pause_max_ms": round(max(d.pause_s or 0.0 for d in decisions) * 1e3, 2),
        "transfer_gb_per_s": round(decisions[-1].num_bytes / sent_s / 1e9, 1),
        "stages_ms": {
            stage: _ms([d.stages_s[stage] for d in decisions]) for stage in decisions[-1].stages_s
        },
        "parts_ms": {name: _ms(values) for name, values in sorted(parts.items())},
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def ceilings(found: dict[str, Any]) -> dict[str, Any]:
    """The same bytes as one copy: on the card, and to the other one."""
    if not torch.cuda.is_available() or not found:
        return {}
    size = max(way["num_bytes"] for way in found.values())
    here, too = (torch.zeros(size, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    copies = {"copy_ms": round(timed(lambda: too.copy_(here)) * 1e3, 3)}
    if torch.cuda.device_count() > 1:
        there = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        seconds = timed(lambda: there.copy_(here))
        copies |= {
            "peer_copy_ms": round(seconds * 1e3, 3),
            "peer_copy_gb_per_s": round(size / seconds / 1e9, 1),
        }
    return copies


def _write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("--engines", default="near,far")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fire", type=int, default=0, help="publications beside responses")
    parser.add_argument("--concurrency", type=int, default=256, help="of them")
    parser.add_argument("--cpu", action="store_true", help="one tiny engine, broadcast by gloo")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.cpu:
        arguments.engines, arguments.shape, arguments.concurrency = "far", "tiny", 8
    # As the trainer's ranks: an engine of SGLang takes such memory from nobody.
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    with tempfile.TemporaryDirectory(prefix="mpp-") as name:
        arguments.model = str(make_model(Path(name) / "model", arguments.shape))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        found = anyio.run(main_async, arguments, Path(name))
    print(json.dumps(found, indent=1))  # what the command is for


if __name__ == "__main__":
    main()
