"""Evaluations of a run as they lie on its disk, and results that stand.

A result stands if its policy belongs to history, whichever epoch made it.
"""

from __future__ import annotations

from pathlib import Path

from runtime.evaluation.receipts import EvaluationReceipt, derive
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record

EVERY = "e*.u*"
"""The pattern of all policies."""


def at_update(update: int) -> str:
    """The pattern of an update's policies, of any epoch."""
    return f"e*.u{update}"


def evaluation_folders(root: RunRoot, policies: str = EVERY) -> list[tuple[PolicyId, Path]]:
    """Every evaluation that was asked for, by policy and set; other folders are passed over.

    Args:
        root: the run.
        policies: of those alone whose ids fit this pattern: a run may have thousands.
    """
    found: list[tuple[PolicyId, Path]] = []
    for path in root.evaluations.glob(f"{policies}/*"):
        try:
            policy = PolicyId.parse(path.parent.name)
        except ValueError:
            continue
        if (path / "request.json").is_file():
            found.append((policy, path))
    return sorted(found)


def standing_result(
    root: RunRoot, records: tuple[Record, ...], *, update: int, set_name: str
) -> tuple[Path, EvaluationReceipt] | None:
    """The folder and receipt of a succeeded evaluation of a set at an update, newest epoch first.

    A rewind makes update 55 anew: only a result whose (epoch, update) stands in the chain counts.

    Raises:
        PartialWrite: if a file of one is damaged.
    """
    for policy, folder in reversed(evaluation_folders(root, at_update(update))):
        if folder.name != set_name or not history.is_standing(records, policy):
            continue
        receipt = derive(folder, stands=True)
        if receipt is not None and receipt.state == "succeeded":
            return folder, receipt
    return None
