"""The way of one request: slot, gate, engine, answer, and on after a publication's abort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from runtime import faults
from runtime.engines.pool import EnginePool
from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.engines.slots import Route
from runtime.errors import ContractViolation, TransportError
from runtime.policy import PolicyId
from runtime.rollout.flight import Flight
from runtime.rollout.gate import AdmissionGate
from runtime.rollout.requests import gather, join
from runtime.rollout.settings import ProducerSettings
from runtime.rollout.signal import Signal
from runtime.rollout.slots import SampleSlots
from runtime.telemetry.events import Event

MAX_CONTINUATIONS = 1000
"""Of one response; an engine that aborts more often than this makes no progress."""


class GenerationCalls:
    """Sends the requests of all groups. Nothing is sent twice: a lost request fails its group."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        gate: AdmissionGate,
        slots: SampleSlots,
        settings: ProducerSettings,
        cut: Callable[[Flight], None],
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._slots = slots
        self._settings = settings
        self._cut = cut
        self._sending: dict[tuple[int, str], dict[str, Flight]] = {}
        """Requests inside each incarnation, by their id."""
        self._published = Signal()
        self.active = 0
        """HTTP requests under way."""
        self.continued = 0
        """Responses that were gone on with after an abort."""
        pool.listen(self._on_pool_event)

    def published(self) -> None:
        """A policy was published: responses waiting for it go on."""
        self._published.notify()

    async def complete(
        self, flight: Flight, input_ids: Sequence[int], sampling: SamplingSettings, *, n: int = 1
    ) -> list[Generation]:
        """Sample ``n`` responses for a group; see ``Generate``. Bind ``flight`` to get one."""
        if flight.reserved >= n:
            flight.reserved -= n
        else:
            await self._slots.take(n)
        try:
            if faults.plan is not None:
                await faults.plan.pause("generation.slot")
            place = await self._gate.enter(partial(self._cut, flight))
            try:
                return await self._to_the_end(flight, tuple(input_ids), sampling, n)
            finally:
                self._gate.leave(place)
        finally:
            self._slots.give(n)

    async def _to_the_end(
        self, flight: Flight, ids: tuple[int, ...], sampling: SamplingSettings, n: int
    ) -> list[Generation]:
        route, answers = await self._send(flight, ids, sampling, n)
        if faults.plan is not None:
            await faults.plan.pause("generation.abort")
        if all(answer.finish != "abort" for answer in answers):
            return answers
        return await gather(
            [partial(self._go_on, flight, ids, sampling, route, a) for a in answers]
        )

    async def _go_on(
        self,
        flight: Flight,
        ids: tuple[int, ...],
        sampling: SamplingSettings,
        route: Route,
        answer: Generation,
    ) -> Generation:
        """Continue an aborted response as prompt + partial, at a newer policy each time.

        A stop text that straddles the seam is not seen by the engine; the response then runs on to
        its next stop or its cap, which is how it is recorded.
        """
        for _ in range(MAX_CONTINUATIONS):
            if answer.finish != "abort":
                return answer
            await self._newer_than(route.policy)
            self.continued += 1
            if faults.plan is not None:
                await faults.plan.pause("generation.continue")
            left = sampling.max_new_tokens - len(answer.token_ids)
            if left <= 0:
                return replace(answer, finish="length", abort_message=None)
            rest = replace(sampling, max_new_tokens=left)
            route, tails = await self._send(flight, ids + answer.token_ids, rest, 1)
            answer = join(answer, tails[0])
        raise ContractViolation(f"a response was aborted {MAX_CONTINUATIONS} times")

    async def _newer_than(self, policy: PolicyId) -> None:
        # Bounded by the group's deadline. While a publication has failed, nothing goes on.
        if faults.plan is not None:
            await faults.plan.pause("generation.wait")
        while self._pool.published is None or self._pool.published <= policy:
            await self._published.wait()

    async def _send(
        self, flight: Flight, ids: tuple[int, ...], sampling: SamplingSettings, n: int
    ) -> tuple[Route, list[Generation]]:
        route = self._pool.choose(flight.route)
        flight.sent_to(route)
        request = GenerateRequest(
            rid=f"e{self._settings.epoch}-{flight.prompt.id}-{flight.attempt}-{flight.calls}",
            input_ids=ids,
            sampling=sampling,
            n=n,
            salt=str(route.policy) if route.takes_salt else None,
            router=self._settings.router,
        )
        answers = await self._ask(flight, route, request)
        problem = _problem(answers, route, request)
        if problem is not None:
            raise ContractViolation(
                f"engine {route.slot} answered {request.rid} with {problem}", rid=request.rid
            )
        return route, answers

    async def _ask(
        self, flight: Flight, route: Route, request: GenerateRequest
    ) -> list[Generation]:
        sending = self._sending.setdefault((route.slot, route.incarnation), {})
        sending[request.rid] = flight
        self._pool.enter(route, request.n)
        self.active += 1
        try:
            await _lossy("generation.request", request)
            answers = await route.client.generate(
                request, deadline_s=self._settings.call_deadline_s
            )
            await _lossy("generation.answer", request)
            return answers
        finally:
            self.active -= 1
            self._pool.leave(route, request.n)
            del sending[request.rid]

    def _on_pool_event(self, event: Event, fields: Mapping[str, object]) -> None:
        if event not in (Event.ENGINE_DIED, Event.ENGINE_RETIRED):
            return
        key = (cast(int, fields["slot"]), str(fields["incarnation"]))
        for rid, flight in self._sending.pop(key, {}).items():
            flight.fail(
                TransportError(
                    f"engine {key[0]} died with {rid} under way: {fields['reason']}",
                    rid=rid,
                    slot=key[0],
                    incarnation=key[1],
                )
            )


async def _lossy(point: str, request: GenerateRequest) -> None:
    if faults.plan is not None and await faults.plan.pause(point) is faults.Kind.DROP:
        raise TransportError(f"{request.rid} was lost at {point}", rid=request.rid)


def _problem(answers: list[Generation], route: Route, request: GenerateRequest) -> str | None:
    if len(answers) != request.n:
        return f"{len(answers)} responses instead of {request.n}"
    for answer in answers:
        # An aborted, empty response was never prefilled: it has no provenance to check.
        if answer.token_ids and answer.prefill < route.policy:
            return (
                f"weights of {answer.prefill}, older than {route.policy} which it was verified at"
            )
        if len(answer.token_ids) > request.sampling.max_new_tokens:
            return f"{len(answer.token_ids)} tokens, more than {request.sampling.max_new_tokens}"
    return None
