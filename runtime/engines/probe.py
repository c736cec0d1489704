"""What an engine can do, found out by asking it: versions and promises are not believed.

An engine that cannot do a thing is no worse for being asked: publications then take the way that
needs less of it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, cast

from runtime.engines.answers import classify, classify_foreign
from runtime.engines.connection import Connection
from runtime.engines.keepalive import check_keepalive_order
from runtime.engines.protocol import EngineInfo
from runtime.engines.scoring import ServerFacts
from runtime.errors import ContractViolation

_HELD_BACK = 6
"""Tokens by which SGLang's longest input is shorter than its context."""
_SPAN_TOKENS = (48, 384, 1536)
"""Lengths to try: the pause has to fall into the response, and a small model is quick."""


async def probe(http: Connection, *, vocab_size: int | None, limit_s: float) -> EngineInfo:
    """Ask everything once, before the engine has traffic.

    Args:
        http: to the engine.
        vocab_size: for engines that do not tell; None: it must.
        limit_s: of each call.

    Raises:
        ConfigError: if it closes idle connections that our client may still use.
        ContractViolation: if nobody says how large the vocabulary is: an id outside ends SGLang.
        RunError: if the engine does not answer.
    """
    asks = _Asks(http, limit_s)
    server = await asks.get("/server_info")
    facts = await asks.facts()
    if "keepalive_s" in facts:
        check_keepalive_order(server_s=float(facts["keepalive_s"]))
    vocab_size = vocab_size or facts.get("vocab_size") or server.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ContractViolation("the engine does not tell its vocabulary; give the client one")
    context = facts.get("context_length") or server.get("context_length")
    context_length = int(context or int(server["max_req_input_len"]) + _HELD_BACK)
    return EngineInfo(
        version=str(server.get("version")),
        vocab_size=vocab_size,
        context_length=context_length,
        max_running_requests=_slots(server),
        native_spans=await _proves_spans(asks, context_length),
        takes_salt=await _takes_salt(asks),
        forgets_prefixes=facts.get("contract") == 1,
        update_bracket=await asks.status("/end_weight_update", {}) != 404,
        hash=facts.get("hash", "sha256"),
        shares=facts.get("shares", "none"),
        takes_adapters=facts.get("takes_adapters", False),
        flat_broadcast=facts.get("flat_broadcast", False),
        own_buckets=facts.get("own_buckets", False),
        own_broadcast=facts.get("own_broadcast", False),
        tensor=int(server.get("tp_size") or 1),
    )


async def server_facts(http: Connection, *, limit_s: float) -> ServerFacts:
    """What a server says about its model when asked once; nothing is tried out on it.

    Raises:
        WaitTimeout, ServingError: if it does not answer, or a gateway does in its place.
        EngineRefused, ContractViolation: if the answer is not of SGLang's contract.
    """
    asks = _Asks(http, limit_s, is_foreign=True)
    server, ours = await asks.get("/server_info"), await asks.facts()
    vocab_size = ours.get("vocab_size") or server.get("vocab_size")
    context = ours.get("context_length") or server.get("context_length")
    if context is None and "max_req_input_len" in server:
        context = int(server["max_req_input_len"]) + _HELD_BACK
    return ServerFacts(
        vocab_size=None if vocab_size is None else int(vocab_size),
        context_length=None if context is None else int(context),
    )


class _Asks:
    """Calls that are expected to succeed."""

    def __init__(self, http: Connection, limit_s: float, *, is_foreign: bool = False) -> None:
        self._http = http
        self._limit_s = limit_s
        self._classify = classify_foreign if is_foreign else classify

    async def get(self, path: str) -> Mapping[str, Any]:
        return self._fields(path, *await self._call("GET", path, None))

    async def post(self, path: str, body: Mapping[str, object]) -> Mapping[str, Any]:
        return self._fields(path, *await self._call("POST", path, body))

    async def status(self, path: str, body: Mapping[str, object]) -> int:
        return (await self._call("POST", path, body))[0]

    async def facts(self) -> Mapping[str, Any]:
        """What our own part of a server tells; empty where it has none."""
        status, answer = await self._call("GET", "/milepost", None)
        return {} if status == 404 else self._fields("/milepost", status, answer)

    async def generate(self, num_tokens: int, **fields: object) -> Mapping[str, Any]:
        """``meta_info`` of one greedy response."""
        params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        answer = await self.post("/generate", {"sampling_params": params, **fields})
        return cast(Mapping[str, Any], answer["meta_info"])

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> tuple[int, object]:
        return await self._http.call(method, path, body, self._limit_s, "readiness")

    def _fields(self, path: str, status: int, answer: object) -> Mapping[str, Any]:
        failure = self._classify(status, answer, call="control")
        if failure is not None:
            raise type(failure)(f"{path}: {failure.message}", **failure.detail)
        if not isinstance(answer, dict):
            raise ContractViolation(f"{path} did not answer with an object")
        return cast(Mapping[str, Any], answer)


def _slots(server: Mapping[str, Any]) -> int:
    """Responses it decodes at once; memory may leave fewer than it was asked for."""
    states = cast(list[Mapping[str, Any]], server.get("internal_states") or [{}])
    settled = states[0].get("effective_max_running_requests_per_dp")
    return int(settled or server.get("max_running_requests") or 0)


async def _takes_salt(asks: _Asks) -> bool:
    """A salt keeps cached prefixes apart: found again under the same one, not under another."""
    marker = uuid.uuid4().hex
    cached: list[int] = []
    for salt in (f"{marker}-a", f"{marker}-a", f"{marker}-b"):
        meta = await asks.generate(1, input_ids=[0] * 8, extra_key=salt)
        cached.append(int(meta.get("cached_tokens") or 0))
    return cached[1] > 0 and cached[2] == 0


async def _proves_spans(asks: _Asks, context_length: int) -> bool:
    """A response that ran across a change of the version says which token is whose.

    The version is changed for real, under a pause in place, and set back.
    """
    before = str((await asks.get("/model_info"))["weight_version"])
    # Unlike any before it: an engine that shows the newest one for all tokens would not be seen.
    other = f"probe-{uuid.uuid4().hex}"
    for wanted in _SPAN_TOKENS:
        num_tokens = min(wanted, context_length - 8)
        versions = await _across(asks, num_tokens, before, other)
        if versions is None:
            return False
        if [version for version, _, _ in versions] == [before, other]:
            (_, start, middle), (_, goes_on, end) = versions
            return (start, goes_on, end) == (0, middle, num_tokens)
    return False


async def _across(
    asks: _Asks, num_tokens: int, before: str, other: str
) -> list[tuple[str, int, int]] | None:
    """Spans of one response with a change of the version within; None where there are none."""
    call = asyncio.ensure_future(asks.generate(num_tokens, input_ids=[0]))
    try:
        while not call.done() and not await _runs(asks):
            pass
        await asks.post("/pause_generation", {"mode": "in_place"})
        await _rename(asks, other)
        await asks.post("/continue_generation", {})
        spans = cast("list[Mapping[str, Any]] | None", (await call).get("weight_versions"))
    finally:
        call.cancel()
        await _rename(asks, before)
    return None if spans is None else [(s["version"], s["start"], s["end"]) for s in spans]


async def _runs(asks: _Asks) -> bool:
    loads = cast(list[Mapping[str, Any]], (await asks.get("/v1/loads"))["loads"])
    return any(int(load["num_running_reqs"]) for load in loads)


async def _rename(asks: _Asks, version: str) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    await asks.post("/update_weight_version", body)
