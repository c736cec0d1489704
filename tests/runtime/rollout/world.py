"""Rollouts in virtual time: real ledger, pool, gate and producer around simulated engines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from runtime.clock import ManualClock
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import Collection, Prompt, PromptId, Span
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import (
    EngineAddress,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    Generation,
    SamplingSettings,
)
from runtime.engines.slots import SlotState
from runtime.errors import DataBudgetExceeded
from runtime.policy import PolicyId
from runtime.rollout.errors_log import ErrorsLog
from runtime.rollout.functions import SingleTurn
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.parts import ProducerParts
from runtime.rollout.producer import Producer
from runtime.rollout.settings import ProducerSettings
from runtime.rollout.stop_rule import StopRule

INFO = EngineInfo(
    version="simulated", vocab_size=64, context_length=64, max_running_requests=64,
    native_spans=True, takes_salt=True, update_bracket=False,
)  # fmt: skip


class VirtualTime(ManualClock):
    """A clock whose sleepers wake in order when it is moved, and never otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._count = itertools.count()

    async def sleep(self, seconds: float) -> None:
        event = anyio.Event()
        heapq.heappush(self._sleepers, (self.monotonic() + seconds, next(self._count), event))
        await event.wait()

    async def run_for(self, seconds: float) -> None:
        """Move on by ``seconds``, letting everything happen in its order."""
        until = self.monotonic() + seconds
        await quiet()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, event = heapq.heappop(self._sleepers)
            self.advance(max(0.0, at - self.monotonic()))
            event.set()
            await quiet()
        self.advance(max(0.0, until - self.monotonic()))
        await quiet()

    def step(self, seconds: float) -> None:
        """Move on and wake who is due, without waiting for what they do."""
        self.advance(seconds)
        while self._sleepers and self._sleepers[0][0] <= self.monotonic():
            heapq.heappop(self._sleepers)[2].set()


async def quiet() -> None:
    """Return when every other task waits for something (anyio's own waits 0.1 s at a time)."""
    calm = 0
    me = asyncio.current_task()
    while calm < 3:
        await asyncio.sleep(0)
        others = (t for t in asyncio.all_tasks() if t is not me)
        waiters = (getattr(t, "_fut_waiter", None) for t in others)
        is_calm = all(w is not None and not w.done() for w in waiters)
        calm = calm + 1 if is_calm else 0


class SimulatedEngine:
    """An engine in virtual time.

    Keeps of a real one: requests end in an order of their own; tokens carry the policy the engine
    held while it made them; ``abort_all`` returns partial responses; a dead engine never answers.
    """

    def __init__(self, world: World, slot: int) -> None:
        self.world = world
        self.slot = slot
        self.url = f"http://engine-{slot}"
        self.held = PolicyId(world.epoch, 0)
        self.requests: list[GenerateRequest] = []
        self.running: dict[str, anyio.Event] = {}
        self.max_running_samples = 0
        self._samples = 0

    async def generate(self, request: GenerateRequest, *, deadline_s: float) -> list[Generation]:
        self.requests.append(request)
        aborted = self.running[request.rid] = anyio.Event()
        self._samples += request.n
        self.max_running_samples = max(self.max_running_samples, self._samples)
        began = self.held
        try:
            await self._work(request, aborted)
        finally:
            self._samples -= request.n
            del self.running[request.rid]
        return [self._answer(request, began, is_aborted=aborted.is_set()) for _ in range(request.n)]

    async def _work(self, request: GenerateRequest, aborted: anyio.Event) -> None:
        outcome = self.world.behave(request)
        async with anyio.create_task_group() as tasks:

            async def stop_when_aborted() -> None:
                await aborted.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_when_aborted)
            await self.world.time.sleep(outcome.seconds)
            tasks.cancel_scope.cancel()
        if outcome.error is not None and not aborted.is_set():
            raise outcome.error

    def _answer(self, request: GenerateRequest, began: PolicyId, *, is_aborted: bool) -> Generation:
        count = 1 if is_aborted else min(2, request.sampling.max_new_tokens)
        spans = [Span(0, count, began)]
        if count == 2 and self.held != began:
            spans = [Span(0, 1, began), Span(1, 2, self.held)]
        return Generation(
            token_ids=tuple(range(count)),
            logprobs=(-1.0,) * count,
            spans=tuple(spans),
            prefill=began,
            finish="abort" if is_aborted else "stop",
            abort_message="Aborted" if is_aborted else None,
        )

    def abort_all(self) -> None:
        for event in self.running.values():
            event.set()

    async def is_alive(self, *, timeout_s: float) -> bool:
        return True

    async def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, token_usage=0.0)

    async def close(self) -> None:
        pass


@dataclass
class Outcome:
    """What an engine does with one request."""

    seconds: float = 1.0
    error: Exception | None = None


class Rewards:
    """Judges like the verifiers would; ``rule`` may raise or sleep in the world's time."""

    def __init__(self) -> None:
        self.rule: Callable[[Prompt], list[float] | Exception] = lambda prompt: []
        self.judged: list[PromptId] = []

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        self.judged.append(prompt.id)
        await anyio.lowlevel.checkpoint()
        given = self.rule(prompt)
        if isinstance(given, Exception):
            raise given
        return given or [float(i % 2) for i in range(len(texts))]


@dataclass
class Budget:
    """Keeps of the real budget: it raises on the failure after the last allowed one."""

    allowed: int = 0
    charged: list[PromptId] = field(default_factory=list)

    def charge(self, prompt: Prompt, error: Exception) -> None:
        self.charged.append(prompt.id)
        if len(self.charged) > self.allowed:
            raise DataBudgetExceeded(f"{len(self.charged)} of {self.allowed}: {error}")


class World:
    """Everything around one producer. ``behave`` says what engines do; time is virtual."""

    epoch = 3

    def __init__(
        self,
        *,
        num_prompts: int = 1000,
        epochs: int = 1,
        engines: int = 1,
        accept: object = None,
        teacher: object = None,
        budget: int = 0,
        ledger: Ledger | None = None,
        seed: int | None = None,
        **settings: object,
    ) -> None:
        self.time = VirtualTime()
        self.behave: Callable[[GenerateRequest], Outcome] = lambda request: Outcome()
        self.engines = [SimulatedEngine(self, slot) for slot in range(engines)]
        self.pool = EnginePool(engines, clock=self.time)
        self.gate = AdmissionGate(clock=self.time, sleep=self.time.sleep)
        self.rewards = Rewards()
        self.budget = Budget(budget)
        self.ledger = ledger or Ledger(PromptOrder(num_prompts, epochs=epochs, shuffle=False))
        given: dict[str, object] = {
            "groups_per_collection": 2,
            "samples_per_prompt": 2,
            "max_concurrent_samples": 64,
            "vocab_size": 64,
            **settings,
        }
        self.settings = ProducerSettings(
            epoch=self.epoch,
            sampling=SamplingSettings(max_new_tokens=8, seed=seed),
            **given,
        )
        self.rows: list[dict[str, object]] = []
        self.series: list[dict[str, float]] = []
        self.rule = StopRule(self.time)
        self.errors = ErrorsLog(
            rule=self.rule,
            requeued=lambda: self.ledger.counts().requeued,
            clock=self.time,
            series=lambda values: self.series.append(dict(values)),
            row=lambda row: self.rows.append(dict(row)),
        )
        self.producer = Producer(
            self.settings,
            ProducerParts(
                ledger=self.ledger,
                prompt=prompt,
                pool=self.pool,
                gate=self.gate,
                function=SingleTurn(decode=lambda ids: " ".join(map(str, ids))),
                judge=self.rewards,
                budget=self.budget,
                accept=accept,
                teacher=teacher,
            ),
            rule=self.rule,
            errors=self.errors,
            clock=self.time,
            sleep=self.time.sleep,
        )
        for slot in range(engines):
            self.join(slot)

    def policy(self, update: int) -> PolicyId:
        return PolicyId(self.epoch, update)

    def join(self, slot: int, incarnation: str = "a") -> None:
        if self.pool.state(slot) is SlotState.DEAD:
            self.pool.restarting(slot)
        address = EngineAddress(
            slot=slot, incarnation=incarnation, url=self.engines[slot].url, pid=1
        )
        self.pool.joined(address, INFO, self.engines[slot])

    def publish(self, update: int) -> None:
        """A refresh in place on every live engine."""
        policy = self.policy(update)
        for engine in self.pool.live():
            self.engines[engine.slot].held = policy
            self.pool.mark_verified(engine.slot, engine.incarnation, policy)
        self.pool.serve(policy)
        self.producer.published(policy)

    @asynccontextmanager
    async def running(self, update: int = 0) -> AsyncGenerator[Producer, None]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.producer.run)
            self.publish(update)
            yield self.producer
            await self.producer.close()

    async def take(self, update: int, num_groups: int | None = None) -> Collection | None:
        """Take while time goes on in steps of a tick."""
        return await self.while_time_passes(
            lambda: self.producer.take(
                num_groups or self.settings.groups_per_collection, self.policy(update)
            )
        )

    async def while_time_passes(self, call, limit_s: float = 10_000.0):
        results: list[object] = []

        async def wait() -> None:
            results.append(await call())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            began = self.time.monotonic()
            await quiet()
            while not results:
                assert self.time.monotonic() - began < limit_s, "nothing came in virtual time"
                await self.time.run_for(0.2)
        return results[0]

    def consume(self, collection: Collection, update: int) -> None:
        self.ledger.consume([(g.prompt.id, g.attempt) for g in collection.groups], update)
        self.producer.consumed(collection.groups)

    async def train(
        self, updates: int, *, start: int = 0, seconds: float = 0.0
    ) -> list[Collection]:
        """The session's loop: take, consume, publish."""
        taken: list[Collection] = []
        for update in range(start, start + updates):
            collection = await self.take(update)
            if collection is None:
                break
            taken.append(collection)
            await self.time.run_for(seconds)
            self.consume(collection, update + 1)
            self.publish(update + 1)
        return taken

    def states(self) -> list[SlotState]:
        return [view.state for view in self.pool.views()]


def prompt(prompt_id: PromptId) -> Prompt:
    return Prompt(
        id=prompt_id, token_ids=(1, 2, 3), text=f"prompt {prompt_id}", answer=None, verifier="none"
    )
