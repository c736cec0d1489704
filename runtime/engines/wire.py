"""``/generate`` on the wire: a request as its body, an answer as Generations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from runtime.data.routed import RoutedExperts, RouterShape
from runtime.data.samples import Span
from runtime.engines.answers import classify, message_of
from runtime.engines.protocol import GenerateRequest, Generation, SamplingSettings
from runtime.errors import ContractViolation
from runtime.policy import PolicyId

NOBODY = "e0.u0"
"""Stands for the policy of a response that nobody read or wrote."""
_policy = lru_cache(64)(PolicyId.parse)
"""Every sample names its policies, and they are few."""


def generate_body(request: GenerateRequest) -> dict[str, object]:
    """The JSON body of a request."""
    body: dict[str, object] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": _sampling(request.sampling, request.n),
        "return_logprob": True,
    }
    if request.router is not None:
        body["return_routed_experts"] = True
    if request.salt is not None:
        body["extra_key"] = request.salt
    return body


def _sampling(settings: SamplingSettings, n: int) -> dict[str, object]:
    params: dict[str, object] = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "ignore_eos": settings.ignore_eos,
        "n": n,
    }
    if settings.stop_token_ids:
        params["stop_token_ids"] = settings.stop_token_ids
    if settings.stop:
        params["stop"] = settings.stop
    if settings.seed is not None:
        params["sampling_seed"] = settings.seed
    return params


def generations(answer: object, *, n: int, router: RouterShape | None = None) -> list[Generation]:
    """Read the body of a 200 answer.

    Args:
        answer: parsed JSON: one sample, or an array of them.
        n: samples that were asked for.
        router: of the model, where choices of experts were asked for.

    Raises:
        RunError: of the class the samples' finish reasons stand for (see ``answers.classify``).
        ContractViolation: if the answer is not what the contract says: another number of samples,
            missing or disagreeing log-probs, spans that do not tile, a version that is no policy
            id, choices of experts that cannot be.
    """
    samples = cast(list[object], answer if isinstance(answer, list) else [answer])
    if len(samples) != n:
        raise ContractViolation(f"asked for {n} samples and got {len(samples)}", num_samples=n)
    try:
        return [_generation(cast(dict[str, Any], sample), router) for sample in samples]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ContractViolation(
            f"an answer of /generate is not what the contract says: {error!r}",
            answer=str(samples)[:500],
        ) from error


def aborted_early(status: int, body: object, request: GenerateRequest) -> list[Generation] | None:
    """What an abort leaves of a request that had not reached the decoder; None for other answers.

    SGLang answers such a one with an error that names it, instead of with partial responses.
    """
    if status not in (400, 499) or message_of(body) != f"Request {request.rid} was aborted":
        return None
    nothing = Generation(
        token_ids=(),
        logprobs=(),
        spans=(),
        prefill=_policy(NOBODY),
        finish="abort",
        abort_message="Aborted",
    )
    return [nothing] * request.n


def _generation(sample: Mapping[str, Any], router: RouterShape | None) -> Generation:
    meta: Mapping[str, Any] = sample["meta_info"]
    finish: Mapping[str, Any] = meta["finish_reason"]
    failure = classify(200, None, finish)
    if failure is not None:
        raise failure
    tokens = tuple(cast(list[int], sample["output_ids"]))
    triples: list[list[Any]] = meta.get("output_token_logprobs") or []
    if len(triples) != len(tokens) or any(t[1] != k for t, k in zip(triples, tokens, strict=True)):
        raise ContractViolation(
            f"{len(triples)} log-probs do not belong to the {len(tokens)} tokens",
            rid=meta.get("id"),
        )
    logprobs = tuple([float(t[0]) for t in triples])
    if not all(map(math.isfinite, logprobs)):
        raise ContractViolation("a log-prob is not finite", rid=meta.get("id"))
    spans = _spans(meta, len(tokens))
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        spans=spans,
        # The first token is drawn from the prefill's own logits. After a retraction the prompt is
        # read again by a newer policy, and the first span still names the oldest one that counts.
        prefill=spans[0].policy if spans else _policy(meta.get("weight_version", NOBODY)),
        finish=cast(Literal["stop", "length", "abort"], finish["type"]),
        abort_message=finish.get("message"),
        # Not told of a request that was aborted while it waited.
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed=None if router is None or not tokens else _routed(meta, len(tokens), router),
    )


def _routed(meta: Mapping[str, Any], num_tokens: int, router: RouterShape) -> RoutedExperts:
    whole = int(meta["prompt_tokens"]) + num_tokens
    return RoutedExperts.decode(meta.get("routed_experts"), num_tokens=whole, shape=router)


def _spans(meta: Mapping[str, Any], num_tokens: int) -> tuple[Span, ...]:
    if num_tokens == 0:
        return ()
    given: Sequence[Mapping[str, Any]] | None = meta.get("weight_versions")
    if not given:
        return (Span(0, num_tokens, _policy(meta["weight_version"])),)
    spans = tuple(Span(s["start"], s["end"], _policy(s["version"])) for s in given)
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            raise ContractViolation(
                f"spans {[(s.start, s.end) for s in spans]} do not tile {num_tokens} tokens",
                rid=meta.get("id"),
            )
        at = span.end
    if at != num_tokens:
        raise ContractViolation(
            f"spans end at {at}, the response at {num_tokens}", rid=meta.get("id")
        )
    return spans
