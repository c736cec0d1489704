"""The laptop task: say four letters backwards. Standard library only."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

LETTERS = "abcdefgh"
LENGTH = 4


@dataclass(frozen=True, slots=True)
class Question:
    """One row of data."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSplit:
    """All questions there are, divided once: no held-out string is ever trained on."""

    training: tuple[Question, ...]
    holdout: tuple[Question, ...]


def split_questions(seed: int, num_holdout: int) -> QuestionSplit:
    """Shuffle the 4096 strings by ``seed`` and keep ``num_holdout`` of them apart.

    Raises:
        ValueError: if ``num_holdout`` leaves nothing to train on, or is negative.
    """
    strings = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    if not 0 <= num_holdout < len(strings):
        raise ValueError(f"num_holdout must lie in [0, {len(strings)}), not {num_holdout}")
    random.Random(f"split {seed}").shuffle(strings)
    questions = tuple(Question(text, text[::-1]) for text in strings)
    return QuestionSplit(training=questions[num_holdout:], holdout=questions[:num_holdout])


def draw(questions: tuple[Question, ...], seed: str) -> Iterator[Question]:
    """Questions without end: pass after pass, each pass in an order of its own made by ``seed``."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(questions, len(questions))
