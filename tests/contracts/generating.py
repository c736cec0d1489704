"""What tests ask of ``/generate``, and whose tokens an answer says it holds."""

from __future__ import annotations

from typing import Any

from tests.contracts.conftest import RunningEngine
from tests.contracts.tiny_models import CONTEXT

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
LONG: dict[str, object] = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": CONTEXT - 8, "ignore_eos": True},
    "return_logprob": True,
}
"""Runs for seconds unless somebody ends it."""


def generate(**fields: object) -> dict[str, object]:
    return {"input_ids": [1, 2, 3], "sampling_params": GREEDY, **fields}


def assert_version(engine: RunningEngine, meta: dict[str, Any], version: str, end: int) -> None:
    """All tokens of a response are of one version, as far as the engine says whose they are."""
    assert meta["weight_version"] == version
    spans = [{"version": version, "start": 0, "end": end}]
    assert meta.get("weight_versions") == (spans if engine.tells_spans else None)
