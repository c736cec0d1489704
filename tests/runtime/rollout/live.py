"""A producer in real time around an engine at a URL, with the real client between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

from runtime.clock import SystemClock
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import Collection, Prompt, PromptId
from runtime.engines.client import HttpEngineClient
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import EngineAddress, EngineInfo, SamplingSettings
from runtime.policy import PolicyId
from runtime.rewards.budget import SkipBudget
from runtime.rollout.errors_log import ErrorsLog
from runtime.rollout.functions import SingleTurn
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.parts import Judge, ProducerParts
from runtime.rollout.producer import Producer
from runtime.rollout.settings import ProducerSettings
from runtime.rollout.stop_rule import StopRule

EPOCH = 3


class HalfRight:
    """A judge without a verifier; keeps the property that every text gets a number."""

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        return [float(i % 2) for i in range(len(texts))]


class LiveRun:
    """Ledger, pool, gate and producer; ``train`` is the session's loop."""

    def __init__(
        self,
        client: HttpEngineClient,
        info: EngineInfo,
        *,
        num_prompts: int,
        prompt: Callable[[PromptId], Prompt],
        judge: Judge | None = None,
        decode: Callable[[object], str] = str,
        max_new_tokens: int = 4,
        seed: int | None = None,
        **settings: object,
    ) -> None:
        clock = SystemClock()
        self.client = client
        self.pool = EnginePool(1, clock=clock)
        self.gate = AdmissionGate(clock=clock)
        self.ledger = Ledger(PromptOrder(num_prompts, shuffle=False))
        self.rows: list[dict[str, object]] = []
        rule = StopRule(clock)
        self.errors = ErrorsLog(
            rule=rule,
            requeued=lambda: self.ledger.counts().requeued,
            clock=clock,
            row=lambda row: self.rows.append(dict(row)),
        )
        given: dict[str, object] = {
            "groups_per_collection": 2,
            "samples_per_prompt": 2,
            "max_concurrent_samples": 8,
            "hold_off_s": 0.05,
            **settings,
        }
        self.settings = ProducerSettings(
            epoch=EPOCH,
            vocab_size=info.vocab_size,
            sampling=SamplingSettings(max_new_tokens=max_new_tokens, seed=seed),
            **given,
        )
        self.producer = Producer(
            self.settings,
            ProducerParts(
                ledger=self.ledger,
                prompt=prompt,
                pool=self.pool,
                gate=self.gate,
                function=SingleTurn(decode=decode),
                judge=judge or HalfRight(),
                budget=SkipBudget(0.0, num_prompts),
            ),
            rule=rule,
            errors=self.errors,
        )
        address = EngineAddress(slot=0, incarnation="a", url=client.url, pid=1)
        self.pool.joined(address, info, client)

    def publish(self, update: int) -> None:
        policy = PolicyId(EPOCH, update)
        self.pool.mark_verified(0, "a", policy)
        self.pool.serve(policy)
        self.producer.published(policy)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Producer]:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.producer.run)
            self.publish(0)
            yield self.producer
            await self.producer.close()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not is_so():  # noqa: ASYNC110  # the condition has no event
                await anyio.sleep(0.005)

    async def train(self, *, on_update: Callable[[int], object] | None = None) -> list[Collection]:
        taken: list[Collection] = []
        update = 0
        while True:
            collection = await self.producer.take(
                self.settings.groups_per_collection, PolicyId(EPOCH, update), no_progress_s=20
            )
            if collection is None:
                return taken
            taken.append(collection)
            update += 1
            self.ledger.consume([(g.prompt.id, g.attempt) for g in collection.groups], update)
            self.producer.consumed(collection.groups)
            if on_update is not None:
                await on_update(update)
            self.publish(update)
