"""Evaluation on the rollout engines, behind the admission gate.

An item is asked up to three more times on serving errors; then the evaluation fails and says how
many items are done, failed and untried. Finished items stay on disk, so the next try repeats none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import anyio

from runtime.clock import Clock
from runtime.data.frozen import PromptStore
from runtime.data.samples import Prompt, PromptId
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import GenerateRequest, Generation
from runtime.errors import (
    DataError,
    EvaluationFailed,
    RunError,
    ServingError,
    TransportError,
    UnavailableError,
)
from runtime.evaluation.items import Item, ItemLog, ItemSample
from runtime.evaluation.metrics import summarise
from runtime.evaluation.sets import EvaluationSet
from runtime.policy import PolicyId
from runtime.rollout.gate import AdmissionGate, EvaluationAdmission
from runtime.rollout.parts import Judge

RETRIES = 3
BACKOFF_S = 1.0
MAX_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSet:
    """A set with its frozen prompts."""

    asked: EvaluationSet
    store: PromptStore
    digest: str
    """Identity of what is asked."""

    @property
    def indices(self) -> range:
        """Rows of the store that are asked."""
        return range(min(len(self.store), self.asked.num_prompts or len(self.store)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLimits:
    """Deadlines and budgets of one evaluation."""

    deadline_s: float
    """All of it, retries of items included."""
    drain_deadline_s: float
    call_deadline_s: float
    skip_share: float
    """``reward.skip_budget``: share of items that may be missing."""
    backoff_s: float = BACKOFF_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRunner:
    """Runs one set at the published policy."""

    pool: EnginePool
    gate: AdmissionGate
    judge: Judge
    decode: Callable[[Sequence[int]], str]
    limits: EvaluationLimits
    clock: Clock
    attempt: int
    epoch: int

    async def run(self, frozen: FrozenSet, policy: PolicyId, log: ItemLog) -> dict[str, float]:
        """Ask what is missing in ``log`` and return the figures of the whole set.

        Args:
            frozen: what is asked.
            policy: must be the published one.
            log: finished items of earlier tries; new ones are appended.

        Raises:
            EvaluationFailed: if items failed after their retries, more are missing than the budget
                allows, or the deadline passed.
            DiskFull: if an item could not be written.
            ContractViolation: if an engine answered outside its contract.
        """
        failures: Counter[str] = Counter()
        todo = self._todo(frozen, log)
        try:
            with anyio.fail_after(self.limits.deadline_s):
                async with self.gate.evaluation(
                    drain_deadline_s=self.limits.drain_deadline_s, max_calls=MAX_CALLS
                ) as admission:
                    await self._ask_all(frozen, policy, todo, log, admission, failures)
                    self._require_all(frozen, log, failures)
        except TimeoutError as error:
            raise self._failed(
                frozen, log, failures, f"not done within {self.limits.deadline_s:g} s"
            ) from error
        items = log.read()
        judged = [item.judged() for item in items.values() if item.state == "done"]
        return summarise(
            judged,
            pass_at=frozen.asked.pass_at,
            seed=frozen.asked.seed,
            num_missing=len(items) - len(judged),
        )

    async def _ask_all(
        self,
        frozen: FrozenSet,
        policy: PolicyId,
        todo: Sequence[int],
        log: ItemLog,
        admission: EvaluationAdmission,
        failures: Counter[str],
    ) -> None:
        broken: list[RunError] = []

        async def one(index: int, scope: anyio.CancelScope) -> None:
            try:
                log.append(await self._item(frozen, policy, index, admission))
            except ServingError as error:
                failures[type(error).__name__] += 1
            except RunError as error:
                broken.append(error)
                scope.cancel()

        # In slices, so that a set of any size holds a bounded number of tasks.
        for start in range(0, len(todo), 4 * MAX_CALLS):
            async with anyio.create_task_group() as tasks:
                for index in todo[start : start + 4 * MAX_CALLS]:
                    tasks.start_soon(one, index, tasks.cancel_scope)
            if broken:
                raise broken[0]

    async def _item(
        self, frozen: FrozenSet, policy: PolicyId, index: int, admission: EvaluationAdmission
    ) -> Item:
        prompt = frozen.store.prompt(PromptId(0, index))
        for number in range(RETRIES + 1):
            try:
                answers = await self._generate(frozen, policy, prompt, admission, number)
                break
            except ServingError:
                if number == RETRIES:
                    raise
                await anyio.sleep(self.limits.backoff_s * 2**number)
        else:  # pragma: no cover - the loop ends by break or raise
            raise AssertionError
        return await self._judged(frozen, policy, index, prompt, answers)

    async def _generate(
        self,
        frozen: FrozenSet,
        policy: PolicyId,
        prompt: Prompt,
        admission: EvaluationAdmission,
        number: int,
    ) -> list[Generation]:
        asked = frozen.asked
        seeds = _seeds(asked, prompt.id.index)
        answers: list[Generation] = []
        for sample, (seed, count) in enumerate(seeds):
            async with admission.call():
                route = self.pool.choose()
                if route.policy != policy:
                    raise UnavailableError(
                        f"engine {route.slot} serves {route.policy}, not {policy}"
                    )
                self.pool.enter(route, count)
                try:
                    answers += await route.client.generate(
                        GenerateRequest(
                            rid=f"eval-{policy}-{asked.name}-{prompt.id.index}-{sample}-{number}",
                            input_ids=prompt.token_ids,
                            sampling=replace(asked.sampling, seed=seed),
                            n=count,
                            salt=str(policy) if route.takes_salt else None,
                        ),
                        deadline_s=self.limits.call_deadline_s,
                    )
                finally:
                    self.pool.leave(route, count)
        if any(answer.finish == "abort" for answer in answers):
            raise TransportError(f"the engine aborted evaluation item {prompt.id.index}")
        return answers

    async def _judged(
        self,
        frozen: FrozenSet,
        policy: PolicyId,
        index: int,
        prompt: Prompt,
        answers: Sequence[Generation],
    ) -> Item:
        texts = [self.decode(answer.token_ids) for answer in answers]
        state: Literal["done", "missing"] = "done"
        samples: tuple[ItemSample, ...] = ()
        problem: str | None = None
        try:
            rewards = await self.judge.judge(prompt, texts)
            samples = tuple(
                ItemSample(
                    text=text,
                    reward=reward,
                    num_tokens=len(answer.token_ids),
                    capped=answer.finish == "length",
                )
                for text, reward, answer in zip(texts, rewards, answers, strict=True)
            )
        except DataError as error:
            state, problem = "missing", f"{type(error).__name__}: {error.message}"
        return Item(
            set_digest=frozen.digest,
            policy=str(policy),
            attempt=self.attempt,
            epoch=self.epoch,
            index=index,
            state=state,
            samples=samples,
            error=problem,
            time=self.clock.time(),
        )

    def _todo(self, frozen: FrozenSet, log: ItemLog) -> list[int]:
        """What has no item yet; and what is missing, where that is what failed the last try."""
        missing = _missing(log)
        if len(missing) <= self._allowed(frozen):
            return log.remaining(frozen.indices)
        return sorted({*log.remaining(frozen.indices), *missing})

    def _require_all(self, frozen: FrozenSet, log: ItemLog, failures: Counter[str]) -> None:
        if failures:
            raise self._failed(frozen, log, failures, "items failed after their retries")
        if (missing := len(_missing(log))) > self._allowed(frozen):
            raise self._failed(frozen, log, failures, f"{missing} items could not be judged")

    def _allowed(self, frozen: FrozenSet) -> int:
        return math.floor(self.limits.skip_share * len(frozen.indices) + 1e-9)

    def _failed(
        self, frozen: FrozenSet, log: ItemLog, failures: Mapping[str, int], why: str
    ) -> EvaluationFailed:
        done = len(log.read())
        failed = sum(failures.values())
        untried = len(frozen.indices) - done - failed
        return EvaluationFailed(
            f"evaluation {frozen.asked.name}: {why}; {done} done, {failed} failed, "
            f"{untried} untried, by error {dict(failures)}",
            done=done,
            failed=failed,
            untried=untried,
            **dict(failures),
        )


def _missing(log: ItemLog) -> list[int]:
    return [index for index, item in log.read().items() if item.state == "missing"]


def _seeds(asked: EvaluationSet, index: int) -> list[tuple[int | None, int]]:
    """(seed, samples) of each request: greedy samples are equal anyway and go out as one."""
    if asked.sampling.temperature == 0:
        return [(None, asked.samples)]
    return [(asked.sample_seed(index, sample), 1) for sample in range(asked.samples)]
