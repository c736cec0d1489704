"""The plainest verifier: the response is the answer."""

from __future__ import annotations

from runtime.rewards.verifiers import Answer, Metadata


def exact_match(
    response: str,
    answer: Answer,
    metadata: Metadata,
    *,
    strip: bool = True,
    whole: bool = True,
    ignore_case: bool = False,
) -> float:
    """1 if the response is the answer, else 0.

    Args:
        response: what the model said.
        answer: what it should have said.
        metadata: not looked at.
        strip: surrounding white space does not count.
        whole: the whole response must match; False: the answer occurs somewhere in it.
        ignore_case: letter case does not count.

    Raises:
        ValueError: if the prompt has no answer, or, with ``whole`` off, an empty one.
    """
    if answer is None:
        raise ValueError("exact_match needs an answer; this prompt has none")
    if strip:
        response, answer = response.strip(), answer.strip()
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    if whole:
        return float(response == answer)
    if not answer:
        raise ValueError("an empty answer occurs in every response")
    return float(answer in response)
