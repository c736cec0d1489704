"""What an attempt is about: its folders, its run file, its epoch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from configs.plan import Plan
from configs.run import RunSpec
from runtime.clock import Clock, SystemClock
from runtime.rundir.attempt import AttemptFile, GuardFile
from runtime.rundir.layout import AttemptDir, RunRoot
from runtime.session.scratch import run_key
from runtime.telemetry.rows import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Read once at the session's start; everything else is built from it."""

    attempt: AttemptDir
    spec: RunSpec
    plan: Plan
    order: AttemptFile
    """What the launcher asked of the guard."""
    epoch: int
    clock: Clock
    started: float
    """Monotonic: bounds of the run count from here, start-up included."""

    @classmethod
    def open(cls, attempt_dir: Path, *, clock: Clock | None = None) -> Self:
        """Read an attempt's files.

        Raises:
            StoreError: if one of them is missing or cannot be read.
        """
        attempt = AttemptDir(attempt_dir.absolute())
        plan = Plan.model_validate_json(attempt.plan.read_bytes())
        clock = clock or SystemClock()
        return cls(
            attempt=attempt,
            spec=RunSpec.model_validate_json(attempt.run.read_bytes()),
            plan=plan,
            order=AttemptFile.read(attempt),
            epoch=GuardFile.read(attempt).epoch,
            clock=clock,
            started=clock.monotonic(),
        )

    @property
    def root(self) -> RunRoot:
        """The output root."""
        return self.attempt.root

    @property
    def age_s(self) -> float:
        """Seconds since this session started."""
        return self.clock.monotonic() - self.started

    def is_over_time(self) -> bool:
        """The run's wall-clock bound has passed."""
        bound = self.spec.core.max_run_seconds
        return bound is not None and self.age_s >= bound

    @property
    def run_key(self) -> str:
        """A short name of the output root, for scratch folders."""
        return run_key(self.root.path)

    @property
    def owner(self) -> Owner:
        """Stamped on every row this session writes."""
        return Owner(attempt=self.attempt.number, epoch=self.epoch)

    @property
    def threads(self) -> int:
        """Torch threads of a worker process on CPU: one each, two contended ones collapse."""
        return int(os.environ.get("MILEPOST_TORCH_THREADS", "1"))
