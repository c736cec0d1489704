"""Instruction constraints that a program can check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from runtime.rewards.verifiers import Answer, Metadata


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_CHECKS: Mapping[str, Callable[[str, Any], bool]] = {
    "min_words": lambda text, value: len(text.split()) >= value,
    "max_words": lambda text, value: len(text.split()) <= value,
    "min_sentences": lambda text, value: len(re.findall(r"[.!?]+(?:\s|$)", text)) >= value,
    "max_sentences": lambda text, value: len(re.findall(r"[.!?]+(?:\s|$)", text)) <= value,
    "num_paragraphs": lambda text, value: len(re.split(r"\n\s*\n", text.strip())) == value,
    "num_bullets": lambda text, value: len(re.findall(r"(?m)^\s*[-*] ", text)) == value,
    "contains": lambda text, value: value.casefold() in text.casefold(),
    "excludes": lambda text, value: value.casefold() not in text.casefold(),
    "starts_with": lambda text, value: text.strip().startswith(value),
    "ends_with": lambda text, value: text.strip().endswith(value),
    "lowercase": lambda text, value: (text == text.lower()) == value,
    "uppercase": lambda text, value: (text == text.upper()) == value,
    "commas": lambda text, value: ("," in text) == value,
    "json": lambda text, value: _is_json(text) == value,
}


def instructions(
    response: str, answer: Answer, metadata: Metadata, *, partial: bool = False
) -> float:
    """1 if every constraint of the prompt holds, else 0.

    Args:
        response: what the model said.
        answer: not looked at.
        metadata: ``constraints``, a list of ``{"kind": ..., "value": ...}``; the kinds are the keys
            of the table above; ``value`` is a count, a text, or true / false (true where absent).
        partial: give the share of constraints that hold instead.

    Raises:
        ValueError: if there is no constraint or a kind is unknown.
    """
    listed = metadata.get("constraints")
    if not isinstance(listed, list) or not listed:
        raise ValueError("instructions need metadata.constraints; this prompt has none")
    held: list[bool] = []
    for item in cast(list[Mapping[str, object]], listed):
        check = _CHECKS.get(str(item["kind"]))
        if check is None:
            raise ValueError(f"unknown constraint {item['kind']!r}; known: {sorted(_CHECKS)}")
        held.append(check(response, item.get("value", True)))
    return sum(held) / len(held) if partial else float(all(held))
