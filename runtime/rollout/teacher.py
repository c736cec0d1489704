"""A teacher served elsewhere: every response of a group is scored by one of its servers.

A call changes nothing there, so it is made again on the same response, unlike one of generation.
What stays bad after that is the group's failure: it goes back to the queue as ``unavailable``.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import anyio
import structlog

from runtime.data.samples import Prompt, Sample
from runtime.data.teacher import TeacherScores
from runtime.engines.scoring import ScoreRequest
from runtime.errors import ServingError, UnavailableError
from runtime.rollout.requests import gather
from runtime.telemetry.events import Event

TRIES = 3
BACKOFF_S = 1.0
"""Before the second try; doubles."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger("rollout")


class ScoringClient(Protocol):
    """The part of ``HttpScoringClient`` that is needed here."""

    @property
    def url(self) -> str:
        """Base address."""
        ...

    async def score(self, request: ScoreRequest, *, deadline_s: float) -> TeacherScores:
        """Log-probs of a given response."""
        ...


class Address:
    """One server of the teacher, and how much is asked of it now."""

    def __init__(self, client: ScoringClient, concurrency: int) -> None:
        self.client = client
        self.places = anyio.Semaphore(concurrency)
        self.num_asked = 0
        """Calls that wait for a place, and those under way."""


class ServedTeacher:
    """Implements ``parts.Teacher``.

    Args:
        clients: one per address; all serve the same weights.
        top_k: what the loss needs: 0, or the number of likeliest tokens.
        deadline_s: of one answer, the wait for a place left out.
        concurrency: most calls under way to one address; more wait here.
        pause: awaited between tries, with seconds.
    """

    def __init__(
        self,
        clients: Sequence[ScoringClient],
        *,
        top_k: int,
        deadline_s: float,
        concurrency: int,
        pause: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._addresses = [Address(client, concurrency) for client in clients]
        self._top_k = top_k
        self._deadline_s = deadline_s
        self._pause = pause

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[TeacherScores]:
        """Score all samples of a group side by side; the first that stays bad ends the others.

        Raises:
            UnavailableError: if a response was not scored in ``TRIES`` tries.
            ContractViolation: if an answer cannot be trained on; it is not asked for again.
        """
        return await gather([partial(self._score, prompt, sample) for sample in samples])

    async def _score(self, prompt: Prompt, sample: Sample) -> TeacherScores:
        failed: Address | None = None
        for number in range(1, TRIES + 1):
            address = self._choose(but=failed)
            try:
                return await self._ask(address, prompt, sample)
            except ServingError as error:
                failed, last = address, error
                url = address.client.url
                _log.warning(
                    Event.TEACHER_RETRIED,
                    prompt=str(prompt.id),
                    url=url,
                    tries=number,
                    error=error.message,
                )
                if number == TRIES:
                    raise UnavailableError(
                        f"the teacher did not score a response to {prompt.id} in {TRIES} tries; "
                        f"the last, {url}: {last.message}",
                        prompt=str(prompt.id),
                        url=url,
                        kind=last.kind,
                    ) from error
            await self._pause(BACKOFF_S * 2 ** (number - 1))
        raise AssertionError("unreachable")

    async def _ask(self, address: Address, prompt: Prompt, sample: Sample) -> TeacherScores:
        request = ScoreRequest(
            rid=f"teacher-{prompt.id}-{uuid.uuid4().hex}",
            prompt_ids=prompt.token_ids,
            token_ids=sample.token_ids,
            top_k=self._top_k,
        )
        address.num_asked += 1
        try:
            async with address.places:
                return await address.client.score(request, deadline_s=self._deadline_s)
        finally:
            address.num_asked -= 1

    def _choose(self, *, but: Address | None) -> Address:
        """The least asked address; not the one that just failed, where there is another."""
        others = [a for a in self._addresses if a is not but] or self._addresses
        return min(others, key=lambda address: address.num_asked)
