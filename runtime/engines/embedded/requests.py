"""One response being generated: what was asked, what has come so far, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Finish = Mapping[str, object]
"""The wire's ``finish_reason``."""

ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: Finish = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL = "The request queue is full."
WAITED_TOO_LONG = "Request waiting timeout reached."
ENGINE_STOPPED = "The engine has stopped."
RAN_TOO_LONG = "Request running timeout reached."


def unavailable(message: str) -> Finish:
    """How a request ends that the engine gave up on: 503 on the wire."""
    return {"type": "abort", "status_code": 503, "message": message, "err_type": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one response is sampled, after the wire's defaults were filled in."""

    max_new_tokens: int
    temperature: float
    """At least 0; below 1e-6 means greedy."""
    top_p: float
    top_k: int
    """-1 switches it off."""
    min_p: float
    stop_token_ids: tuple[int, ...]
    """The end-of-sequence ids among them, unless they are ignored."""
    stop: tuple[str, ...]
    seed: int | None
    """None: the engine draws one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One response. Only the decoder's thread touches the mutable part until it has finished."""

    rid: str
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None = None
    wants_logprobs: bool = False
    logprob_start: int = -1
    """Prompt token after which log-probs are wanted; -1: none."""
    num_top: int = 0
    """How many of the likeliest tokens are wanted at each of those places."""
    streams: bool = False
    sibling: int = 0
    """Which of n samples of one call this is."""
    arrived_s: float = 0.0
    """On the scheduler's clock, which stands still while generation is paused."""
    started_s: float | None = None

    seed_drawn: int | None = None
    """Set on first admission; kept over retractions, so that a seed fixes the whole response."""
    slot: int = -1
    """Its slot while it runs; -1 otherwise."""
    output: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    marks: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(first token, weight version) of each stretch of the response; the first is the prefill's."""
    input_logprobs: list[float] | None = None
    """Of the prompt's tokens but the first."""
    input_top: list[tuple[list[float], list[int]]] = field(
        default_factory=list[tuple[list[float], list[int]]]
    )
    """Log-probs and ids of the likeliest tokens, for each token after ``logprob_start``."""
    num_retractions: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    version: str = ""
    """The weight version when it ended."""

    def mark(self, start: int, version: str) -> None:
        """Tokens from ``start`` on come from ``version``."""
        if self.marks and self.marks[-1][1] == version:
            return
        if self.marks and self.marks[-1][0] == start:
            self.marks.pop()
            if self.marks and self.marks[-1][1] == version:
                return
        self.marks.append((start, version))

    def spans(self) -> list[dict[str, object]]:
        """The wire's ``weight_versions``: stretches that tile the output."""
        if not self.marks:
            return []
        ends = [*(start for start, _ in self.marks), len(self.output)][1:]
        return [
            {"version": version, "start": start, "end": end}
            for (start, version), end in zip(self.marks, ends, strict=True)
            if end > start
        ]
