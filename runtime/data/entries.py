"""What the ledger holds for a prompt, and what it hands out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

from runtime.data.samples import PromptId
from runtime.data.segments import Consumed, Prompts


class Stage(StrEnum):
    """Where a pending prompt is."""

    QUEUED = "queued"
    IN_FLIGHT = "in flight"
    FINISHED = "finished"


@dataclass(slots=True)
class OpenPrompt:
    """A prompt that was admitted and has no end yet."""

    position: int
    attempt: int
    stage: Stage
    num_stale: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Leave to generate one group."""

    prompt_id: PromptId
    attempt: int
    """Counts from 1 for each prompt."""
    num_stale: int
    """How often this prompt was sent back as too old; from 1 on the trainer waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The ledger in numbers; every prompt of the passes begun is in exactly one of the states."""

    remaining: int
    """Not admitted yet, of the passes begun (the first one counts as begun from the start)."""
    pending: int
    consumed: int
    filtered: int
    dropped: int
    skipped: int
    requeued: int
    """Group attempts sent back so far."""
    lost: int
    """Prompts in no state; 0 unless the ledger is broken."""
    doubled: int
    """Prompts with more than one end; 0 unless the ledger is broken."""
    digest: str
    queued: int
    """Of the pending ones: waiting to go out again."""
    in_flight: int
    """Of the pending ones: being generated or judged."""
    finished: int
    """Of the pending ones: finished and not consumed."""


class Ends:
    """Ends since the last commit that stands, as flat columns in order."""

    def __init__(self) -> None:
        self.pass_ = array("q")
        self.index = array("q")
        self.update = array("q")

    def append(self, prompt: PromptId, update: int = -1) -> None:
        """Add one end; ``update`` is -1 where no update used the prompt."""
        self.pass_.append(prompt.pass_)
        self.index.append(prompt.index)
        self.update.append(update)

    def forget(self, count: int) -> None:
        """Let the oldest ``count`` go: a commit holds them now."""
        for column in (self.pass_, self.index, self.update):
            del column[:count]

    def prompts(self) -> Prompts:
        """The ends as a segment stores them."""
        return Prompts(pass_=tuple(self.pass_), index=tuple(self.index))

    def consumed(self) -> Consumed:
        """The ends with their updates."""
        return Consumed(pass_=tuple(self.pass_), index=tuple(self.index), update=tuple(self.update))
