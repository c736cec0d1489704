"""Results that stand: of a policy that belongs to history, whichever epoch made it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.evaluation.receipts import EvaluationReceipt, derive
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record


def standing_result(
    root: RunRoot, records: Sequence[Record], *, update: int, set_name: str
) -> tuple[Path, EvaluationReceipt] | None:
    """The folder and receipt of a succeeded evaluation of a set at an update, newest epoch first.

    A rewind makes update 55 anew: only a result whose (epoch, update) stands in the chain counts.
    """
    found: list[tuple[PolicyId, Path]] = []
    for folder in root.evaluations.glob(f"e*.u{update}/{set_name}"):
        try:
            policy = PolicyId.parse(folder.parent.name)
        except ValueError:
            continue
        if history.is_standing(records, policy):
            found.append((policy, folder))
    for _, folder in sorted(found, reverse=True):
        receipt = derive(folder, stands=True)
        if receipt is not None and receipt.state == "succeeded":
            return folder, receipt
    return None
