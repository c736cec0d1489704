"""The teacher's servers of a session: connected, compared with the student, and let go."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import anyio

from configs.run import RunSpec
from configs.teacher import Teacher
from runtime.data.encoder import Encode, load_encoder
from runtime.engines.scoring import TextScores
from runtime.engines.scoring_client import HttpScoringClient
from runtime.errors import (
    ConfigError,
    ContractViolation,
    EngineRefused,
    ServiceUnavailable,
    ServingError,
    WaitTimeout,
)
from runtime.rollout.teacher import ServedTeacher
from runtime.session.preparing import Prepared
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.waits import stretched

READY_DEADLINE_S = 120.0
"""Of each server's first answers, stretched as a readiness."""
_POLL_S = 1.0
_SAME_MODEL = 0.5
"""Largest mean gap of log-probs between two servers of one teacher; precision makes hundredths."""
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; 3.14159 + 2 = 5.14159.\n"
    'def f(x):\n\treturn {"a": [x, -x]}  # na\u00efve \u00fc\u00df \u4e2d\u6587 \u0436'
)
"""Letters, digits, spaces, code and three scripts: tokenizers differ somewhere in it."""

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Student:
    """What a teacher's server must agree with."""

    vocab_size: int
    encode: Encode
    longest: int
    """Tokens of the longest prompt and response together."""
    texts: tuple[str, ...]
    """Read by both sides and compared."""


def token_of(teacher: Teacher, environ: Mapping[str, str] = os.environ) -> str | None:
    """The bearer token of the teacher's servers; None where they want none.

    Raises:
        ConfigError: if ``teacher.token_env`` names a variable that is not set here.
    """
    if teacher.token_env is None:
        return None
    token = environ.get(teacher.token_env)
    if not token:
        raise ConfigError(
            f'teacher.token_env = "{teacher.token_env}": this process has no such variable; on a '
            f"cluster launch.secrets brings it, elsewhere export it before the run starts"
        )
    return token


@asynccontextmanager
async def open_teacher(
    spec: RunSpec, prepared: Prepared, *, vocab_size: int, prompt: str
) -> AsyncGenerator[ServedTeacher | None]:
    """The served teacher of a run, compared with the student; None where there is none.

    Args:
        spec: the run file.
        prepared: its tokenizer, and how long prompts are.
        vocab_size: of the student.
        prompt: text of one prompt of the run, compared beside ``PROBE``.

    Raises:
        ConfigError: if a server reads text differently, has another vocabulary or too short a
            context, refuses the token, or two servers are not the same model.
        ServiceUnavailable: if one does not answer in time.
    """
    teacher = spec.teacher
    if teacher is None or not teacher.url:
        yield None
        return
    token = token_of(teacher)
    clients = [
        HttpScoringClient(
            url, api_key=token, vocab_size=vocab_size, max_connections=teacher.concurrency + 8
        )
        for url in teacher.url
    ]
    student = Student(
        vocab_size=vocab_size,
        encode=load_encoder(Path(prepared.tokenizer)),
        longest=prepared.longest_prompt_tokens + spec.rollout.max_response_tokens,
        texts=tuple(text for text in (PROBE, prompt) if text),
    )
    try:
        await check_servers(clients, student)
        yield ServedTeacher(
            clients,
            top_k=teacher.top_k,
            deadline_s=stretched("judge", teacher.deadline),
            concurrency=teacher.concurrency,
        )
    finally:
        with anyio.CancelScope(shield=True):
            for client in clients:
                await client.close()


async def check_servers(
    clients: Sequence[HttpScoringClient],
    student: Student,
    *,
    deadline_s: float | None = None,
) -> None:
    """Compare every server with the student, and with the first one; raises as ``open_teacher``.

    Args:
        clients: one per address.
        student: what they must agree with.
        deadline_s: of each server; None: ``READY_DEADLINE_S``, stretched.
    """
    limit_s = stretched("readiness", READY_DEADLINE_S) if deadline_s is None else deadline_s
    first: list[TextScores] = []
    for client in clients:
        found = await _check_server(client, student, limit_s)
        first = first or found
        gap = _gap(first, found)
        if not gap <= _SAME_MODEL:
            raise ConfigError(
                f"teacher.url: {clients[0].url} and {client.url} are not the same model: their "
                f"log-probs of one text differ by {gap:.2f} on the mean"
            )


def _gap(mine: Sequence[TextScores], theirs: Sequence[TextScores]) -> float:
    """Mean gap of the log-probs of the same texts, over the tokens that both sides have one of.

    The first token of a text has none where no begin token stands in front of it.
    """
    gaps: list[float] = []
    for one, other in zip(mine, theirs, strict=True):
        backwards = zip(reversed(one.logprobs), reversed(other.logprobs), strict=False)
        gaps += [abs(a - b) for a, b in backwards]
    return fmean(gaps) if gaps else 0.0


async def _check_server(
    client: HttpScoringClient, student: Student, limit_s: float
) -> list[TextScores]:
    """Facts, then texts; how it read them."""
    found = "nothing came back"
    with anyio.move_on_after(limit_s):
        while True:
            try:
                return await _compare(client, student, limit_s)
            except (ServingError, WaitTimeout) as error:
                found = error.message
            except (ContractViolation, EngineRefused) as error:
                raise ConfigError(
                    f"teacher.url: {client.url} is no server of SGLang's contract that scores "
                    f"text for us (a token is sent by teacher.token_env): {error.message}",
                    url=client.url,
                ) from error
            await anyio.sleep(_POLL_S)
    raise ServiceUnavailable(
        f"teacher.url: {client.url} did not answer within {limit_s:g} s: {found}", url=client.url
    )


async def _compare(client: HttpScoringClient, student: Student, limit_s: float) -> list[TextScores]:
    facts = await client.server_facts()
    if facts.vocab_size not in (None, student.vocab_size):
        raise ConfigError(
            f"teacher.url: {client.url} has a vocabulary of {facts.vocab_size}, the student "
            f"{student.vocab_size}",
            url=client.url,
        )
    needed = student.longest + 1
    if facts.context_length is not None and facts.context_length < needed:
        raise ConfigError(
            f"teacher.url: {client.url} has a context of {facts.context_length} tokens; prompt, "
            f"response and one more need {needed}",
            url=client.url,
        )
    # Cut by the student's need, not by a server's context: servers are compared piece by piece.
    cut = (pieces(whole, student.encode, student.longest) for whole in student.texts)
    read: list[TextScores] = []
    for text in chain.from_iterable(cut):
        rid = f"teacher-check-{uuid.uuid4().hex}"
        scores = await client.score_text(text, rid=rid, deadline_s=limit_s)
        _require_same_reading(client.url, text, scores.token_ids, student)
        read.append(scores)
    _log.info(
        Event.TEACHER_CHECKED,
        url=client.url,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
    )
    return read


def pieces(text: str, encode: Encode, room: int) -> Iterator[str]:
    """The text in pieces of at most ``room`` tokens each, by any tokenizer; room >= 1.

    A character is at most four bytes, so it is rarely more tokens. One that is more than ``room``
    by the student's is left out.
    """
    while text:
        size = min(len(text), max(1, room // 4))
        while size and len(encode(text[:size], True)) > room:
            size //= 2
        if size:
            yield text[:size]
        text = text[max(size, 1) :]


def _require_same_reading(url: str, text: str, found: tuple[int, ...], student: Student) -> None:
    """Servers may or may not put a begin token in front."""
    wanted = [tuple(student.encode(text, special)) for special in (True, False)]
    if found in wanted:
        return
    mine = wanted[1]
    at = next((i for i, (a, b) in enumerate(zip(found, mine, strict=False)) if a != b), -1)
    raise ConfigError(
        f"teacher.url: {url} reads text with another tokenizer than the student: {len(found)} "
        f"tokens against {len(mine)} of {text[:40]!r}..., the first other one at {at}",
        url=url,
        teacher=list(found[:32]),
        student=list(mine[:32]),
    )
