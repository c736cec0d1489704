"""What the producer works with, and the narrow faces of those parts that live in other rooms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.data.ledger import Ledger
from runtime.data.samples import Prompt, PromptId, Sample
from runtime.data.teacher import TeacherScores
from runtime.engines.pool import EnginePool
from runtime.errors import DataError
from runtime.rollout.filters import GroupFilter
from runtime.rollout.functions import RolloutFunction
from runtime.rollout.gate import AdmissionGate


class Judge(Protocol):
    """The verifiers."""

    async def judge(self, prompt: Prompt, texts: list[str]) -> list[float]:
        """Reward of each text, in order.

        Raises:
            DataError: if a text could not be judged, after a second try on it.
        """
        ...


class Teacher(Protocol):
    """A teacher served elsewhere (OPD)."""

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[TeacherScores]:
        """What it says about each sample, in order.

        Raises:
            ServingError: if it could not be asked, after its retries; the group may be tried again.
            ContractViolation: if an answer cannot be trained on.
        """
        ...


class DataBudget(Protocol):
    """The data-failure budget, ``reward.skip_budget``."""

    def charge(self, prompt: Prompt, error: DataError) -> None:
        """Charge one group.

        Raises:
            DataBudgetExceeded: if that was one too many.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerParts:
    """Everything outlives the producer."""

    ledger: Ledger
    prompt: Callable[[PromptId], Prompt]
    pool: EnginePool
    gate: AdmissionGate
    function: RolloutFunction
    judge: Judge | None
    """None: the algorithm has no rewards (OPD); every reward is 0 then."""
    budget: DataBudget
    shape: Callable[[Sample], float] | None = None
    """What to add to a sample's verdict for its length (overlong shaping); None adds nothing."""
    accept: GroupFilter | None = None
    """Filter on judged groups; None lets everything through."""
    teacher: Teacher | None = None
    """None: there is none, or the trainer holds it."""
