"""Mathematical equality, by the math-verify library.

Its own time limits are signals and work in main threads only; ours is the death of the worker, so
they are off.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, cast

from runtime.rewards.verifiers import Answer, Metadata

# Each call would warn that the library's own limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_answer(response: str, answer: Answer, metadata: Metadata) -> float:
    r"""1 if the last answer in the response equals the reference mathematically, else 0.

    Numbers, fractions, sets, intervals, equations; ``\boxed{}`` in the response goes first,
    boxes side by side are read as one set. A response without anything to read as an answer is
    wrong, not a failure.

    Raises:
        ValueError: if the reference itself cannot be read.
        Exception: whatever the library raises while it compares.
    """
    from math_verify import verify  # pyright: ignore[reportMissingTypeStubs]  # it has none

    check = cast(Any, verify)
    if answer is None or not (gold := _reference(answer)):
        raise ValueError(f"math cannot read the reference answer {answer!r}")
    found = _parse(response)
    if not found:
        return 0.0
    return float(check(list(gold), found, timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=256)
def _reference(answer: str) -> tuple[object, ...]:
    """The reference, as it stands or as LaTeX; one parse for all responses of a group."""
    is_marked = "$" in answer or "\\boxed" in answer
    return tuple((_parse(answer) if is_marked else None) or _parse(f"${answer}$"))


def _parse(text: str) -> list[object]:
    from math_verify import parse  # pyright: ignore[reportMissingTypeStubs]  # it has none

    return cast(Any, parse)(text, parsing_timeout=None)
