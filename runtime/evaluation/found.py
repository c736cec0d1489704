"""Evaluations of a run as they lie on its disk."""

from __future__ import annotations

from pathlib import Path

from runtime.policy import PolicyId
from runtime.rundir.layout import RunRoot

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
