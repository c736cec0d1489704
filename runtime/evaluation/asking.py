"""What a session says about evaluations that others run: requests, voids, failures of tries."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.errors import AttemptError, RunError, ServingError
from runtime.evaluation.files import ask_once, skip
from runtime.evaluation.opening import Asker
from runtime.evaluation.reading import receipts_of
from runtime.evaluation.records import Result, TryError
from runtime.evaluation.shared import FrozenSet
from runtime.policy import PolicyId
from runtime.rundir.failure import fingerprint
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record


def ask_for_final(
    root: RunRoot, sets: Mapping[str, FrozenSet], policy: PolicyId, asker: Asker
) -> None:
    """Write the final requests of a policy, to be exported from its commit. Idempotent."""
    for name, frozen in sets.items():
        folder = root.evaluation(str(policy), name)
        ask_once(folder, asker.request(frozen, policy, "final", mode="background"))


def void_unstarted(root: RunRoot, records: tuple[Record, ...], *, time: float) -> list[str]:
    """Void the final evaluations that an attempt goes on past before they started.

    Called by a session that is about to train on: what it passes is no run's last update any more.

    Returns:
        Their keys.
    """
    voided: list[str] = []
    for folder, receipt in receipts_of(root, records):
        is_final = receipt.request.kind == "final"
        if is_final and receipt.stands and receipt.state in ("requested", "submitted"):
            skip(folder, "superseded", time=time)
            voided.append(receipt.key)
    return voided


def failed_result(error: RunError, *, set_name: str, time: float, trainer: int | None) -> Result:
    """The result of a try that ended with an error.

    Args:
        error: what ended it.
        set_name: of the evaluation; part of the fingerprint.
        time: wall seconds.
        trainer: the trainer's update at that moment, where it is known.
    """
    name = type(error).__name__
    return Result(
        time=time,
        state="failed",
        error=TryError(
            error_class=name,
            fingerprint=fingerprint(name, f"evaluation/{set_name}", error.message),
            message=error.message[:2000],
            counts={k: v for k, v in error.detail.items() if isinstance(v, int)},
            is_exempt=isinstance(error, ServingError | AttemptError),
        ),
        trainer_update=trainer,
    )
