"""What ``status`` says about a run that was submitted: its newest receipt, its scheduler's word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from configs.run import RunSpec
from runtime.errors import ConfigError, RunError
from runtime.launch.receipts import LaunchReceipt, Receipts
from runtime.launch.sending import backend_of
from runtime.launch.standing import AttemptStanding
from runtime.launch.telling import told
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerReport:
    """The newest submitted attempt of a run."""

    receipt: LaunchReceipt
    standing: AttemptStanding | None
    """None where the scheduler could not be asked."""
    problem: str = ""
    """Why it could not."""

    def as_object(self) -> dict[str, Any]:
        """For ``--json``."""
        standing = self.standing
        return {
            "backend": self.receipt.backend,
            "attempt": self.receipt.attempt,
            "job": self.receipt.job,
            "class": standing.kind.value if standing else None,
            "status": standing.raw if standing else None,
            "reason": standing.reason if standing else self.problem,
            "auto_resume": self.receipt.auto_resume,
            "ranks": [
                {"rank": r.rank, "class": r.kind.value, "status": r.raw, "host": r.host,
                 "reason": r.reason}
                for r in (standing.ranks if standing else ())
            ],
            "oddities": list(standing.oddities) if standing else [],
            "gpus": {
                "requested": self.receipt.requested_gpus,
                "active": self._gpus("active_gpus"),
                "allocated": self._gpus("allocated_gpus"),
            },
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For a person."""
        receipt, standing = self.receipt, self.standing
        head = f"attempt {receipt.attempt} at {receipt.backend}"
        if standing is None:
            yield f"{head}: not known, {self.problem}"
            return
        why = f"  {standing.reason}" if standing.reason else ""
        yield f"{head}: {standing.kind} ({standing.raw}){why}"
        yield f"  submitted with auto_resume {receipt.auto_resume or 'not recorded'}"
        for each in standing.ranks if len(standing.ranks) > 1 else ():
            yield f"  rank {each.rank:<3} {each.kind:<12} {each.raw}  {each.host}  {each.reason}"
        for oddity in standing.oddities:
            yield f"  off: {oddity}"
        if receipt.requested_gpus:
            yield (
                f"  GPUs: {receipt.requested_gpus} requested, "
                f"{_known(self._gpus('active_gpus'))} active, "
                f"{_known(self._gpus('allocated_gpus'))} paid for"
            )

    def _gpus(self, name: Literal["active_gpus", "allocated_gpus"]) -> int | None:
        """What the scheduler says now; of an attempt that is over, the most it ever said."""
        now: int | None = getattr(self.standing, name, None)
        return getattr(self.receipt, name) if now is None else now


def report(root: RunRoot, spec: RunSpec | None = None) -> SchedulerReport | None:
    """Ask the scheduler of a run's newest receipt; None where it was never submitted from here.

    Args:
        root: the run.
        spec: its run file; None takes the one frozen in the root.
    """
    kept = Receipts()
    receipts = kept.of_root(root.path)
    if not receipts:
        return None
    receipt = receipts[-1]
    try:
        asked = spec or _frozen(root.path)
        standing = backend_of(asked).look(receipt)
    except RunError as error:
        return SchedulerReport(receipt=receipt, standing=None, problem=error.message)
    except (OSError, ValidationError):
        problem = "the run file cannot be read from here: give the TOML file"
        return SchedulerReport(receipt=receipt, standing=None, problem=problem)
    receipt = kept.note_gpus(
        receipt, active=standing.active_gpus, allocated=standing.allocated_gpus
    )
    standing = told(standing, _records(root), receipt.attempt)
    return SchedulerReport(receipt=receipt, standing=standing)


def stop_at_scheduler(root: RunRoot, spec: RunSpec | None = None) -> str | None:
    """Ask the scheduler to end the newest submitted attempt. Idempotent.

    Returns:
        The job's name; None where nothing was submitted from here, or it is over.

    Raises:
        RunError: if the scheduler cannot be asked.
    """
    found = report(root, spec)
    if found is None or (found.standing is not None and found.standing.kind.is_over):
        return None
    try:
        backend_of(spec or _frozen(root.path)).stop(found.receipt)
    except (OSError, ValidationError) as error:
        raise ConfigError(found.problem) from error
    return found.receipt.key


def _records(root: RunRoot) -> tuple[Record, ...] | None:
    """The chain; None where it cannot be read from here."""
    try:
        return Chain(root).read() if root.path.is_dir() else None
    except (OSError, RunError):
        return None


def _frozen(root: Path) -> RunSpec:
    return RunSpec.model_validate_json(atomic.read_bytes(RunRoot(root).run) or b"")


def _known(count: int | None) -> str:
    return "not known" if count is None else str(count)
