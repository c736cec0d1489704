"""Request bodies of ``/generate``: parsed once, refused with SGLang's words."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from runtime.engines.embedded.envelopes import bad_request, invalid_body, unknown_field
from runtime.engines.embedded.requests import Request, SamplingParams

SUPPORTED = (
    "max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "n",
    "ignore_eos", "sampling_seed",
)  # fmt: skip
"""Sampling keys that do something here."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "stop_regex": (None,), "json_schema": (None,), "regex": (None,), "ebnf": (None,),
    "structural_tag": (None,), "custom_params": (None,), "stream_interval": (None,),
    "logit_bias": (None,), "min_new_tokens": (0, None), "frequency_penalty": (0, None),
    "presence_penalty": (0, None), "repetition_penalty": (1, None),
    "skip_special_tokens": (True, None), "spaces_between_special_tokens": (True, None),
    "no_stop_trim": (False, None),
}  # fmt: skip
"""SGLang's other keys, with the values that change nothing: only those are taken."""

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SAMPLES = 4096
"""Most samples of one call."""
MAX_STOPS = 256
"""Most stop token ids of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a body is checked against."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]] | None
    """Text to token ids; None where the model has no tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One ``POST /generate``: its requests in the order of the answer."""

    requests: list[Request] = field(repr=False)
    is_batch: bool
    """The answer is an array."""
    stream: bool
    rid: str | None
    """The caller's own id, when it gave one text; it names all requests of the call."""


def parse_generate(body: object, rules: Rules) -> Call:
    """Check a body and make its requests.

    Raises:
        Refused: with the status and envelope SGLang answers for the same mistake.
    """
    if not isinstance(body, dict):
        raise invalid_body("dict_type", ("body",), "Input should be a valid dictionary")
    fields = cast(dict[str, Any], body)
    prompts, is_batch = _prompts(fields, rules)
    per_prompt = _per_prompt(fields.get("sampling_params"), len(prompts), "sampling_params")
    params = [_sampling(p, rules) for p in per_prompt]
    num_samples = {n for _, n in params}
    if len(num_samples) > 1:
        raise bad_request(
            "The parallel_sample_num should be the same for all samples in sample params."
        )
    n = num_samples.pop() if num_samples else 1
    if n * len(prompts) > MAX_SAMPLES:
        raise bad_request(f"one call may ask for {MAX_SAMPLES} samples, got {n * len(prompts)}.")
    for prompt, (sampling, _) in zip(prompts, params, strict=True):
        _check_length(prompt, sampling, rules.context_length)
    rid = fields.get("rid")
    rids = _rids(rid, len(prompts), n)
    stream = _flag(fields, "stream")
    wants_logprobs = _flag(fields, "return_logprob")
    start = _integer(fields.get("logprob_start_len", -1), "logprob_start_len")
    salts = _per_prompt(fields.get("extra_key"), len(prompts), "extra_key")
    if any(s is not None and not isinstance(s, str) for s in salts):
        raise invalid_body("value_error", ("body", "extra_key"), "must be str, list or null")
    num_top = _num_top(fields, rules)
    if num_top and not (wants_logprobs and start >= 0):
        raise bad_request(
            "top_logprobs_num is for prompts here: it needs return_logprob and logprob_start_len."
        )
    if fields.get("token_ids_logprob"):
        raise bad_request("token_ids_logprob is not supported by this engine.")
    requests = [
        Request(
            rid=rids[i * n + sibling],
            prompt=prompt,
            params=sampling,
            salt=salts[i],
            wants_logprobs=wants_logprobs,
            logprob_start=start if wants_logprobs else -1,
            num_top=num_top,
            streams=stream,
            sibling=sibling,
        )
        for i, (prompt, (sampling, _)) in enumerate(zip(prompts, params, strict=True))
        for sibling in range(n)
    ]
    return Call(
        requests=requests,
        is_batch=is_batch or n > 1,
        stream=stream,
        rid=rid if isinstance(rid, str) else None,
    )


def _prompts(fields: Mapping[str, Any], rules: Rules) -> tuple[list[tuple[int, ...]], bool]:
    text, ids = fields.get("text"), fields.get("input_ids")
    if ids is not None and not isinstance(ids, list):
        raise invalid_body(
            "value_error", ("body", "input_ids"), f"must be list or null; got {type(ids).__name__}"
        )
    if text is not None:
        texts = cast(list[object], text) if isinstance(text, list) else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise invalid_body("value_error", ("body", "text"), "must be str, list or null")
        if rules.encode is None:
            raise bad_request("text needs a tokenizer and this model has none; send input_ids.")
        prompts = [rules.encode(str(t)) for t in texts]
        return [_ids(p, rules.vocab_size) for p in prompts], isinstance(text, list)
    if ids is None:
        raise bad_request("Either text, input_ids or input_embeds should be provided.")
    if not ids:
        raise bad_request("input_ids cannot be empty.")
    lists = cast(list[object], ids)
    if isinstance(lists[0], list):
        return [_ids(p, rules.vocab_size) for p in lists], True
    return [_ids(lists, rules.vocab_size)], False


def _ids(ids: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(t) is int for t in cast(list[object], ids)):
        raise invalid_body("value_error", ("body", "input_ids"), "must be a list of integers")
    tokens = cast(list[int], ids)
    if not tokens:
        raise bad_request("input_ids cannot be empty.")
    # SGLang's scheduler dies of such an id and takes the server along.
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        outside = next(t for t in tokens if not 0 <= t < vocab_size)
        raise bad_request(f"token id {outside} is outside the vocabulary [0, {vocab_size}).")
    return tuple(tokens)


def _check_length(prompt: tuple[int, ...], params: SamplingParams, context: int) -> None:
    if len(prompt) >= context:
        raise bad_request(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({context} tokens)."
        )
    total = len(prompt) + params.max_new_tokens
    if total > context:
        raise bad_request(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {total} tokens: {len(prompt)} tokens from the "
            f"input messages and {params.max_new_tokens} tokens for the completion. Please reduce "
            "the number of tokens in the input messages or the completion to fit within the limit."
        )


def _sampling(given: object, rules: Rules) -> tuple[SamplingParams, int]:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise invalid_body("value_error", ("body", "sampling_params"), "must be dict, list or null")
    values = cast(dict[str, Any], given)
    for name, value in values.items():
        if name not in SUPPORTED:
            if name not in NEUTRAL:
                raise unknown_field(name, (*SUPPORTED, *NEUTRAL))
            if value not in NEUTRAL[name]:
                raise bad_request(f"{name}={value!r:.80} is not supported by this engine.")
    temperature = _number(values.get("temperature", 1.0), "temperature")
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise bad_request(f"temperature must be a non-negative finite number, got {temperature:g}.")
    top_p = _number(values.get("top_p", 1.0), "top_p")
    if not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p:g}.")
    min_p = _number(values.get("min_p", 0.0), "min_p")
    if not 0.0 <= min_p <= 1.0:
        raise bad_request(f"min_p must be in [0, 1], got {min_p:g}.")
    top_k = _integer(values.get("top_k", -1), "top_k")
    if top_k < 1 and top_k != -1:
        raise bad_request(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    given_limit = values.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    limit = _integer(
        DEFAULT_MAX_NEW_TOKENS if given_limit is None else given_limit, "max_new_tokens"
    )
    if limit < 0:
        raise bad_request(f"max_new_tokens must be at least 0, got {limit}.")
    n = _integer(values.get("n", 1), "n")
    if not 1 <= n <= MAX_SAMPLES:
        raise bad_request(f"n must be in [1, {MAX_SAMPLES}], got {n}.")
    seed = values.get("sampling_seed")
    stop_ids = list(_integers(values.get("stop_token_ids"), "stop_token_ids"))
    if not values.get("ignore_eos"):
        stop_ids += rules.eos_token_ids
    params = SamplingParams(
        max_new_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=tuple(t for t in dict.fromkeys(stop_ids) if 0 <= t < rules.vocab_size),
        stop=_stop_strings(values.get("stop"), rules),
        seed=None if seed is None else _integer(seed, "sampling_seed"),
    )
    return params, n


def _stop_strings(given: object, rules: Rules) -> tuple[str, ...]:
    if isinstance(given, list):
        stops = cast(list[object], given)
    else:
        stops = [] if given is None else [given]
    if not all(isinstance(s, str) and s for s in stops):
        raise bad_request("stop must be a text or a list of texts, none of them empty.")
    if stops and rules.encode is None:
        raise bad_request("stop needs a tokenizer and this model has none; use stop_token_ids.")
    return tuple(cast(list[str], stops))


def _num_top(fields: Mapping[str, Any], rules: Rules) -> int:
    value = fields.get("top_logprobs_num")
    count = 0 if value is None else _integer(value, "top_logprobs_num")
    if not 0 <= count <= rules.vocab_size:
        raise bad_request(f"top_logprobs_num must be in [0, {rules.vocab_size}], got {count}.")
    return count


def _rids(rid: object, num_prompts: int, n: int) -> list[str]:
    """One id per request; a text names all of a batch with a suffix, a list names its prompts."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts * n)]
    if isinstance(rid, str):
        if num_prompts * n == 1:
            return [rid]
        return [f"{rid}_{i}" for i in range(num_prompts * n)]
    if isinstance(rid, list) and len(cast(list[object], rid)) == num_prompts:
        names = cast(list[object], rid)
        if (
            all(isinstance(r, str) for r in names)
            and len(set(cast(list[str], names))) == num_prompts
        ):
            return [f"{r}_{i}" if n > 1 else str(r) for r in names for i in range(n)]
    raise bad_request("rid must be a text, or a list with one different text per prompt.")


def _per_prompt(given: object, num_prompts: int, name: str) -> list[Any]:
    if isinstance(given, list):
        values = cast(list[Any], given)
        if len(values) != num_prompts:
            raise bad_request(f"{name} has {len(values)} entries for {num_prompts} prompts.")
        return values
    return [given] * num_prompts


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, list):
        values = cast(list[object], value)
        if values and isinstance(values[0], bool) and all(v is values[0] for v in values):
            return values[0]
    raise invalid_body("value_error", ("body", name), "must be bool or null")


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name} must be a number, got {value!r:.80}.")
    try:
        return float(value)
    except OverflowError:
        raise bad_request(f"{name} must be a finite number, got {value!r:.80}.") from None


def _integer(value: object, name: str) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise bad_request(f"{name} must be an integer of 64 bits, got {value!r:.80}.")
    return value


def _integers(values: object, name: str) -> list[int]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise bad_request(f"{name} must be a list of integers, got {values!r:.80}.")
    numbers = cast(list[object], values)
    if len(numbers) > MAX_STOPS:
        raise bad_request(f"{name} may have {MAX_STOPS} entries, got {len(numbers)}.")
    return [_integer(v, name) for v in numbers]
