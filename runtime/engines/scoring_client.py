"""The client of a server that scores given text: a teacher's, which may be somebody else's.

It generates nothing that is kept and controls nothing, so that it is no ``EngineClient``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

import orjson

from runtime.data.teacher import TeacherScores
from runtime.engines.answers import classify_foreign
from runtime.engines.connection import Connection
from runtime.engines.probe import server_facts
from runtime.engines.scoring import (
    ScoreRequest,
    ServerFacts,
    TextScores,
    read_scores,
    read_text_scores,
    score_body,
    text_body,
)
from runtime.errors import ContractViolation, GenerationTimeout

_CONNECT_S = 10.0
_FACTS_S = 30.0


class HttpScoringClient:
    """Speaks to one server. No call is repeated here.

    Args:
        url: base address.
        api_key: bearer token, where the server wants one.
        vocab_size: ids of both sides lie in [0, vocab_size): one outside ends SGLang's server.
        max_connections: connections at once; a call over it waits within its own deadline.
    """

    def __init__(
        self, url: str, *, vocab_size: int, api_key: str | None = None, max_connections: int = 64
    ) -> None:
        self._url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._http = Connection(
            self._url, api_key=api_key, max_connections=max_connections, connect_s=_CONNECT_S
        )

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return self._url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections."""
        await self._http.close()

    async def score(self, request: ScoreRequest, *, deadline_s: float) -> TeacherScores:
        """Log-probs of a given response. Changes nothing there: it may be asked again.

        Args:
            request: prompt and response.
            deadline_s: of the whole answer.

        Raises:
            GenerationTimeout: if no whole answer came in time.
            TransportError, OverloadError, UnavailableError: see ``answers.classify_foreign``.
            ContractViolation: for anything else, an answer to another question among them.
        """
        for token in (*request.prompt_ids, *request.token_ids):
            if not 0 <= token < self._vocab_size:
                raise ContractViolation(
                    f"token id {token} is outside the vocabulary [0, {self._vocab_size})",
                    token=token,
                )
        answer = await self._ask(score_body(request), request.rid, deadline_s)
        return read_scores(answer, request, vocab_size=self._vocab_size)

    async def score_text(self, text: str, *, rid: str, deadline_s: float) -> TextScores:
        """How the server's tokenizer and model read a text; raises as ``score`` does."""
        return read_text_scores(await self._ask(text_body(rid, text), rid, deadline_s))

    async def server_facts(self) -> ServerFacts:
        """What the server says about its model; see ``probe.server_facts``."""
        return await server_facts(self._http, limit_s=_FACTS_S)

    async def _ask(self, body: Mapping[str, object], rid: str, deadline_s: float) -> object:
        try:
            async with asyncio.timeout(deadline_s):
                status, answer = await self._http.send("POST", "/generate", orjson.dumps(body))
        except TimeoutError as error:
            raise GenerationTimeout(
                f"no answer to {rid} within {deadline_s:g} s", rid=rid, url=self._url
            ) from error
        if (failure := classify_foreign(status, answer)) is not None:
            raise failure
        return answer
