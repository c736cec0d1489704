"""Scoring a given text by ``POST /generate``: what is asked, and the answer as log-probs.

SGLang's way of it: the text is the prompt, one token is generated and thrown away, and the prompt's
own log-probs come with the answer. They are at temperature 1 whatever the request says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from runtime.data.teacher import TeacherScores
from runtime.engines.answers import finish_foreign
from runtime.errors import ContractViolation


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Log-probs of ``token_ids`` after ``prompt_ids``; neither is empty."""

    rid: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    top_k: int
    """0: of ``token_ids`` themselves; K: of the K likeliest tokens at each of their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores:
    """How a server reads a text."""

    token_ids: tuple[int, ...]
    """As its own tokenizer has it."""
    logprobs: tuple[float, ...]
    """Of all but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about its model; None where it does not."""

    vocab_size: int | None
    context_length: int | None


_ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}


def score_body(request: ScoreRequest) -> dict[str, object]:
    """The JSON body of a request."""
    return {
        "rid": request.rid,
        "input_ids": [*request.prompt_ids, *request.token_ids],
        "sampling_params": _ONE_TOKEN,
        "return_logprob": True,
        # The first entry has no log-prob on any engine: it is the last token of the prompt.
        "logprob_start_len": len(request.prompt_ids) - 1,
        "top_logprobs_num": request.top_k,
    }


def text_body(rid: str, text: str) -> dict[str, object]:
    """The body that asks how a server reads a text."""
    return {
        "rid": rid,
        "text": text,
        "sampling_params": _ONE_TOKEN,
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def read_scores(answer: object, request: ScoreRequest, *, vocab_size: int) -> TeacherScores:
    """Read the answer to ``score_body``.

    Args:
        answer: parsed JSON of a 200.
        request: that was sent.
        vocab_size: the student's; the teacher's ids must lie within it.

    Raises:
        RunError: of the class its finish reason stands for (see ``answers.finish_foreign``).
        ContractViolation: if tokens, counts or values are not what was asked for.
    """
    try:
        meta = _meta(answer)
        echoed = _echo(meta)[1:]
        if not _same_ids([e[1] for e in echoed], request.token_ids, vocab_size):
            raise ContractViolation(
                f"{request.rid}: the teacher scored other tokens than were sent"
            )
        if request.top_k == 0:
            scores = TeacherScores.of_sampled(_finite([float(e[0]) for e in echoed]))
        else:
            scores = _likeliest(meta, request, vocab_size)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ContractViolation(
            f"{request.rid}: the teacher's answer is not what the contract says: {error!r}",
            answer=str(answer)[:500],
        ) from error
    scores.arrays(len(request.token_ids))
    return scores


def read_text_scores(answer: object) -> TextScores:
    """Read the answer to ``text_body``; raises as ``read_scores`` does."""
    try:
        echoed = _echo(_meta(answer))
        return TextScores(
            token_ids=tuple(int(e[1]) for e in echoed),
            logprobs=tuple(_finite([float(e[0]) for e in echoed[1:]])),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ContractViolation(
            f"the teacher's reading of a text is not what the contract says: {error!r}",
            answer=str(answer)[:500],
        ) from error


def _meta(answer: object) -> Mapping[str, Any]:
    meta: Mapping[str, Any] = cast(Mapping[str, Any], answer)["meta_info"]
    finish: Mapping[str, Any] = meta["finish_reason"]
    if (failure := finish_foreign(finish)) is not None:
        raise failure
    return meta


def _echo(meta: Mapping[str, Any]) -> list[list[Any]]:
    return cast(list[list[Any]], meta["input_token_logprobs"])


def _likeliest(meta: Mapping[str, Any], request: ScoreRequest, vocab_size: int) -> TeacherScores:
    places = cast(list[list[list[Any]]], meta["input_top_logprobs"])[1:]
    ids = [[int(entry[1]) for entry in place] for place in places]
    if any(len(set(place)) != request.top_k for place in ids):
        raise ContractViolation(
            f"{request.rid}: {request.top_k} different tokens were asked for at each place"
        )
    if not all(0 <= each < vocab_size for place in ids for each in place):
        raise ContractViolation(
            f"{request.rid}: the teacher names tokens outside the student's vocabulary of "
            f"{vocab_size}"
        )
    values = [_finite([float(entry[0]) for entry in place]) for place in places]
    return TeacherScores.of_likeliest(values, ids)


def _finite(values: list[float]) -> list[float]:
    """The values; rounding may leave one a little above 0."""
    if not all(math.isfinite(value) and value <= 1e-3 for value in values):
        raise ValueError("a log-prob that is not finite or above 0")
    return values


def _same_ids(echoed: Sequence[int], sent: Sequence[int], vocab_size: int) -> bool:
    """SGLang echoes the last id of its vocabulary as 0."""
    last = vocab_size - 1
    return len(echoed) == len(sent) and all(
        e == s or (e == 0 and s >= last) for e, s in zip(echoed, sent, strict=True)
    )
