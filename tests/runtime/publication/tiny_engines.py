"""Engines in memory for the transaction's tests, and a wrapper that makes chosen calls fail.

``TinyEngine`` keeps of a real one: weights come from the files it is told to load, they are copied
before it answers, ``pause``/``resume`` gate serving, and loading from disk sets the policy with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import torch
from safetensors.torch import load

from runtime.engines.protocol import EngineInfo
from runtime.errors import EngineRefused, TransportError
from runtime.policy import PolicyId
from runtime.publication.checksum import checksums
from runtime.publication.protocol import ONLY_SHA256, Target
from runtime.publication.safetensors_file import spec_of
from runtime.publication.snapshot import write_snapshot
from runtime.publication.told import WrittenSnapshot

INFO = EngineInfo(
    version="tiny",
    vocab_size=8,
    context_length=8,
    max_running_requests=1,
    native_spans=True,
    takes_salt=True,
    forgets_prefixes=True,
    update_bracket=False,
)


class TinyTrainer:
    """A trainer whose weights say which update they are of."""

    def __init__(self, num_tensors: int = 3) -> None:
        self.update = 0
        self.num_tensors = num_tensors
        self.num_exports = 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"layer.{i}.weight": torch.full((2, 4), float(self.update * 100 + i))
            for i in range(self.num_tensors)
        }

    def weight_specs(self):
        return [spec_of(name, tensor) for name, tensor in self.weights().items()]

    def export_weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.num_exports += 1
        for item in self.weights().items():
            yield [item]

    async def write_snapshot(self, folder: str, kinds=ONLY_SHA256) -> WrittenSnapshot:
        return write_snapshot(self, folder, kinds)


@dataclass
class Journal:
    """What happened, in order, over all engines of a test."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def add(self, what: str, slot: int) -> None:
        self.events.append((what, slot))

    def of(self, what: str) -> list[int]:
        return [slot for name, slot in self.events if name == what]


class TinyEngine:
    """One engine of one incarnation; implements the parts of EngineClient a publication calls."""

    def __init__(self, slot: int, journal: Journal, info: EngineInfo = INFO) -> None:
        self.slot = slot
        self.url = f"http://tiny/{slot}"
        self.journal = journal
        self.the_info = info
        self.weights: dict[str, torch.Tensor] = {"layer.0.weight": torch.zeros(1)}
        self.says = "default"
        self.paused: str | None = None
        self.num_flushed = 0
        self.running = 1
        self.is_dead = False

    def _live(self) -> None:
        if self.is_dead:
            raise TransportError(f"connection refused by {self.url}")

    async def info(self) -> EngineInfo:
        self._live()
        return self.the_info

    async def pause(self, mode: str) -> None:
        self._live()
        self.journal.add("pause", self.slot)
        self.paused = mode
        if mode == "abort":
            self.running = 0

    async def resume(self) -> None:
        self._live()
        self.journal.add("resume", self.slot)
        self.paused = None

    async def flush_cache(self) -> None:
        self._live()
        if self.running:
            raise EngineRefused("Flush cache failed.")
        self.num_flushed += 1

    async def update_from_disk(self, path: str, policy: PolicyId, *, flush: bool) -> None:
        self._live()
        if self.paused is None:
            raise EngineRefused("weights may not change under running requests")
        if flush:
            await self.flush_cache()
        self.journal.add("load", self.slot)
        self.weights = _read(Path(path))
        self.says = str(policy)

    async def checksums(self) -> dict[str, str]:
        self._live()
        return checksums(self.weights.items())

    async def set_policy(self, policy: PolicyId) -> None:
        self._live()
        self.journal.add("set_policy", self.slot)
        self.says = str(policy)

    async def policy(self) -> str:
        self._live()
        return self.says


def _read(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load(file.read_bytes()))
    return weights


Kind = Literal["refuse", "lose", "hang", "nothing", "torn", "bug"]
KINDS: tuple[Kind, ...] = ("refuse", "lose", "hang", "nothing", "torn", "bug")


class Faults:
    """Makes the calls of one slot fail, and counts what fired."""

    def __init__(self) -> None:
        self.plan: dict[tuple[int, str], Kind] = {}
        self.fired: Counter[tuple[int, str, Kind]] = Counter()

    def wrap(self, engine: TinyEngine) -> FaultyClient:
        return FaultyClient(engine, self)


class FaultyClient:
    """An engine's client; a planned call fails in its way instead of (or after) being done."""

    def __init__(self, engine, faults: Faults) -> None:
        self.engine = engine
        self.faults = faults

    @property
    def url(self) -> str:
        return self.engine.url

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        method = getattr(self.engine, name)

        async def call(*args: object, **options: object) -> object:
            kind = self.faults.plan.get((self.engine.slot, name))
            if kind is None:
                return await method(*args, **options)
            self.faults.fired[self.engine.slot, name, kind] += 1
            return await self._fail(name, kind, method, *args, **options)

        return call

    async def _fail(self, name: str, kind: Kind, method, *args, **options) -> object:
        match kind:
            case "refuse":
                raise EngineRefused("400: no")
            case "lose":
                await method(*args, **options)  # done, but the answer is lost
                raise TransportError("connection reset")
            case "hang":
                await anyio.sleep_forever()
            case "bug":
                raise RuntimeError("an error that nobody expected")
            case "nothing":
                return await self._nothing(name, method)
            case "torn":
                answer = await method(*args, **options)
                first = next(iter(self.engine.weights))
                self.engine.weights[first] = self.engine.weights[first].clone().fill_(-1.0)
                return answer
        raise AssertionError(kind)

    async def _nothing(self, name: str, method) -> object:
        """Answer success without doing anything."""
        if name == "checksums":
            return {}
        if name == "policy":
            return "default"
        return await method() if name == "info" else None


def target(engine: TinyEngine, faults: Faults | None = None) -> Target:
    client = engine if faults is None else faults.wrap(engine)
    return Target(slot=engine.slot, incarnation=f"i{engine.slot}", client=client)
