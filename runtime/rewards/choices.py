"""Multiple choice: which letter did the response settle on?"""

from __future__ import annotations

import re
import string
from typing import cast

from runtime.rewards.verifiers import Answer, Metadata

_MOST_CHOICES = 26
_USUAL_CHOICES = 10


def multiple_choice(response: str, answer: Answer, metadata: Metadata) -> float:
    r"""1 if the letter the response settles on is the right one, else 0.

    Looked for in this order, the last occurrence of the first kind that occurs: ``\boxed{B}``;
    "answer is B" or "answer: (B)"; a response that is nothing but the letter; "(B)" anywhere; a
    line that begins with "B." or "B)". None of them: the response chose nothing and is wrong.

    Args:
        response: what the model said.
        answer: the right letter, or the text of the right choice when ``choices`` is a list.
        metadata: ``choices``, a list of texts or their number; 10 without it.

    Raises:
        ValueError: if the answer names none of the choices.
    """
    letters, right = _right(answer, metadata.get("choices"))
    return float(_settled_on(response, letters) == right)


def _right(answer: Answer, choices: object) -> tuple[str, str]:
    listed = cast(list[object], choices) if isinstance(choices, list) else []
    texts = [str(choice).strip() for choice in listed]
    count = len(texts) or (choices if isinstance(choices, int) else _USUAL_CHOICES)
    if not 2 <= count <= _MOST_CHOICES:
        raise ValueError(f"multiple choice between {count}")
    letters = string.ascii_uppercase[:count]
    said = (answer or "").strip()
    letter = said.strip("().").upper()
    if len(letter) == 1 and letter in letters:
        return letters, letter
    if texts.count(said) == 1:
        return letters, letters[texts.index(said)]
    raise ValueError(f"the answer {answer!r} is none of the choices {letters[0]}-{letters[-1]}")


def _settled_on(response: str, letters: str) -> str | None:
    one = f"[{letters[0]}-{letters[-1]}]"
    either = f"[{letters[0]}-{letters[-1]}{letters[0].lower()}-{letters[-1].lower()}]"
    # No two repeats that stand side by side match the same character, and no run of them is entered
    # from more than one start: a response is read in time linear in its length.
    for pattern in (
        rf"\\boxed\{{\s*(?:\\text\{{\s*)?\(?({either})\)?\s*\}}",
        rf"(?i:answer)\s*(?i:is|:)\s*(?::\s*)?[*_]*\(?({one})\)?(?![A-Za-z])",
        rf"\A\s*[*_(]*({either})[*_).]*\s*\Z",
        rf"\(({one})\)",
        rf"(?m)^[^\S\n]*({one})[.)](?:\s|$)",
    ):
        found = re.findall(pattern, response)
        if found:
            return found[-1].upper()
    return None
