"""One group under way: from its admission by the ledger to samples with rewards, or its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import anyio

from runtime import faults
from runtime.data.samples import Group, Prompt, Sample, validate_sample
from runtime.engines.slots import Route
from runtime.errors import ContractViolation, GenerationTimeout, ServingError
from runtime.policy import PolicyId
from runtime.rollout.functions import Generate, RolloutFunction, RolloutTask
from runtime.rollout.parts import Judge, Teacher
from runtime.rollout.settings import ProducerSettings


class Flight:
    """Who owns a group under way, how long it may take, and why it was cancelled, if it was.

    Args:
        prompt: what is asked.
        attempt: its attempt in the ledger.
        num_stale: how often it was sent back as too old; from 1 on the trainer waits for it.
        order: admissions before it, to tell the older of two groups.
        reserved: sample slots it holds from the start.
        admitted_s: open-gate time of its admission.
    """

    __slots__ = (
        "admitted_s", "attempt", "calls", "failure", "is_generated", "is_with_teacher", "key",
        "num_stale", "oldest", "order", "prompt", "reason", "reserved", "route", "scope",
        "under_way",
    )  # fmt: skip

    def __init__(
        self,
        *,
        prompt: Prompt,
        attempt: int,
        num_stale: int,
        order: int,
        reserved: int,
        admitted_s: float,
    ) -> None:
        self.prompt = prompt
        self.attempt = attempt
        self.key = (prompt.id, attempt)
        self.num_stale = num_stale
        self.order = order
        self.reserved = reserved
        self.admitted_s = admitted_s
        self.scope = anyio.CancelScope()
        self.reason: str | None = None
        """Why we cancelled it, where that is no failure."""
        self.failure: ServingError | None = None
        """What it failed of, where that was not raised by its own requests."""
        self.route: Route | None = None
        self.oldest: PolicyId | None = None
        """Policy of the engine its first request went to: nothing in it can be older."""
        self.calls = 0
        """Requests sent."""
        self.under_way = 0
        """Those of them that have not ended; none once the attempt was joined."""
        self.is_with_teacher = False
        """All samples are there, and a served teacher is asked about them; within the deadline."""
        self.is_generated = False
        """All samples are there, with their scores where a teacher is served; what remains is the
        verifiers', who have limits of their own."""

    def cancel(self, reason: str) -> None:
        """End the attempt for a reason that is no failure of it; it is joined, then requeued."""
        if self.is_wanted:
            self.reason = reason
            self.scope.cancel()

    def fail(self, error: ServingError) -> None:
        """End the attempt as failed: its engine died, or its deadline has passed."""
        if self.is_wanted:
            self.failure = error
            self.scope.cancel()

    @property
    def is_wanted(self) -> bool:
        """Nobody has ended it."""
        return self.reason is None and self.failure is None

    def sent_to(self, route: Route) -> None:
        """A request goes out now."""
        self.calls += 1
        self.route = route
        if self.oldest is None or route.policy < self.oldest:
            self.oldest = route.policy

    def check_deadline(self, open_s: float, settings: ProducerSettings) -> None:
        """Fail it if its deadline has passed, in open-gate time.

        The limit in force covers the way to the first request, then generation to its end and
        the scores of a served teacher. The message says which of them it was.
        """
        limit = settings.waiting_deadline_s + (settings.running_deadline_s if self.calls else 0.0)
        if self.is_generated or open_s - self.admitted_s <= limit:
            return
        if self.is_with_teacher:
            stage, found = "teacher", "was generated and still waited for the teacher's scores"
        elif self.calls:
            stage, found = "generation", "was not generated to its end"
        else:
            stage, found = "admission", "had sent no request"
        self.fail(
            GenerationTimeout(
                f"group {self.prompt.id} {found} after {limit:g} s with the gate open",
                prompt=str(self.prompt.id),
                stage=stage,
                deadline_s=limit,
            )
        )


async def make_group(
    flight: Flight,
    generate: Generate,
    *,
    function: RolloutFunction,
    judge: Judge | None,
    shape: Callable[[Sample], float] | None,
    settings: ProducerSettings,
    on_generated: Callable[[], None],
    teacher: Teacher | None = None,
) -> Group:
    """Generate, validate and judge one group.

    Args:
        flight: the attempt.
        generate: its way to the engines.
        function: makes the samples.
        judge: None where the algorithm has no rewards (OPD); every reward is 0 then.
        shape: added to the reward of each sample, or None.
        settings: numbers and sampling.
        on_generated: told once all samples are there and valid, before reward and filter: for the
            stop rule the attempt has succeeded.
        teacher: scores each sample before that; None: nobody does.

    Raises:
        ServingError: a request failed, or the teacher's did; siblings were cancelled and joined.
        DataError: a response could not be judged.
        ContractViolation: samples or rewards that must not be trained on.
    """
    task = RolloutTask(
        prompt=flight.prompt, num_samples=settings.samples_per_prompt, sampling=settings.sampling
    )
    samples = await function(task, generate)
    if faults.plan is not None:
        await faults.plan.pause("group.generated")
    _validate(samples, flight, settings)
    if teacher is not None:
        flight.is_with_teacher = True
        scores = await teacher.score(flight.prompt, samples)
        samples = [replace(s, teacher=t) for s, t in zip(samples, scores, strict=True)]
    flight.is_generated = True
    on_generated()
    rewards = [0.0] * len(samples)
    if judge is not None:
        rewards = await judge.judge(flight.prompt, [sample.text for sample in samples])
    if shape is not None:
        rewards = [r + shape(s) for r, s in zip(rewards, samples, strict=True)]
    if len(rewards) != len(samples) or not all(map(math.isfinite, rewards)):
        raise ContractViolation(
            f"group {flight.prompt.id}: {len(samples)} samples were judged as {rewards!r}",
            prompt=str(flight.prompt.id),
        )
    return Group(
        prompt=flight.prompt,
        attempt=flight.attempt,
        samples=tuple(replace(s, reward=r) for s, r in zip(samples, rewards, strict=True)),
    )


def _validate(samples: list[Sample], flight: Flight, settings: ProducerSettings) -> None:
    if len(samples) != settings.samples_per_prompt:
        raise ContractViolation(
            f"group {flight.prompt.id} has {len(samples)} samples instead of "
            f"{settings.samples_per_prompt}",
            prompt=str(flight.prompt.id),
        )
    for sample in samples:
        validate_sample(sample, epoch=settings.epoch, vocab_size=settings.vocab_size)
