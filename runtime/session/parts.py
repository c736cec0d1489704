"""Everything a session works with, made and ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from runtime.checkpoints.commit import Committer
from runtime.data.ledger import Ledger
from runtime.evaluation.sets import Kind
from runtime.evaluation.shared import FrozenSet
from runtime.policy import PolicyId
from runtime.rollout.producer import Producer
from runtime.session.books import Books
from runtime.session.context import Context
from runtime.session.preparing import Prepared
from runtime.session.probing import AgreementProbe
from runtime.session.publishing import Publishing
from runtime.session.retrying import StepRetries
from runtime.session.signals import Signals
from runtime.session.view import SessionView
from runtime.telemetry.recorder import Recorder
from runtime.trainer.protocol import TrainBatch, TrainMetrics


class Trainer(Protocol):
    """The trainer group, as the sequence uses it."""

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """One collection, one call; see ``TrainerBackend``."""
        ...


class Exporter(Protocol):
    """Writes the HF export of the trainer's present weights."""

    async def export(self, policy: PolicyId) -> None:
        """Write and verify it; idempotent per policy."""
        ...


class Copies(Protocol):
    """The run's copy in an object store, as the sequence uses it."""

    async def tell_rewinds(self) -> None:
        """Return once the store knows what was undone in this run; idempotent."""
        ...


class SetEvaluator(Protocol):
    """Evaluates the sets of a run at the published policy, or asks others to."""

    @property
    def sets(self) -> Mapping[str, FrozenSet]:
        """By name."""
        ...

    @property
    def outstanding(self) -> list[str]:
        """Required sets without a result at the end, as ``evaluation/<update>/<set>``."""
        ...

    async def evaluate(self, name: str, policy: PolicyId, *, kind: Kind) -> object:
        """Make one set's result at ``policy`` stand, or its request; idempotent."""
        ...

    async def final(self, policy: PolicyId, *, retries: int, backoff_s: float) -> None:
        """Do so for every set at a run's end; what fails is outstanding, and raises nothing."""
        ...

    async def settle(self) -> None:
        """Wait for what is made beside training."""
        ...

    def ask_later(self, policy: PolicyId) -> None:
        """Ask for the final evaluation of a run that is taken off its hardware. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one session; all of them outlive the sequence."""

    context: Context
    prepared: Prepared
    restored: bool
    """Trainer and ledger stand at a commit; False on a fresh start."""
    trainer: Trainer
    ledger: Ledger
    producer: Producer
    publishing: Publishing
    commits: Committer
    copies: Copies | None
    """None where no copies are asked for."""
    evaluator: SetEvaluator
    probe: AgreementProbe
    exporter: Exporter
    steps: StepRetries
    signals: Signals
    view: SessionView
    books: Books
    recorder: Recorder
