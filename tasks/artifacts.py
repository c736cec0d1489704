"""Artifacts of a flow run: a progress bar, the table of collections, the summary."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from runtime.evaluation.reading import receipts_of
from runtime.rundir import workflow
from runtime.rundir.chain import Chain
from runtime.session.answers import Running
from tasks.display import only_display, show
from tasks.handle import RunHandle, Stretch

MAX_ROWS = 200
ROWS_DEADLINE_S = 2.0
"""Longest wait for rows that are still in the session's buffer."""


class StretchProgress:
    """The progress artifact of one stretch, updated at most once per change of percent."""

    def __init__(self, run: RunHandle, stretch: Stretch) -> None:
        self._stretch = stretch
        self._shown = 0.0
        self._id: UUID | None = None
        with only_display("the progress bar"):
            created = create_progress_artifact(
                progress=0.0, key=f"{run.key}-progress", description=stretch.title
            )
            self._id = cast(UUID, created)

    def show(self, running: Running) -> None:
        """Move the bar to where the session is."""
        if running.view is None or self._id is None:
            return
        done = running.view.update - self._stretch.after
        percent = round(100 * max(0, done) / (self._stretch.update - self._stretch.after))
        if percent > self._shown:
            self._shown = percent
            with only_display("progress"):
                update_progress_artifact(
                    artifact_id=self._id,
                    progress=float(min(percent, 100)),
                    description=f"{self._stretch.title}: update {running.view.update}, "
                    + ", ".join(f"{k} {v}" for k, v in running.view.detail.items()),
                )

    def finish(self) -> None:
        """The stretch is trained."""
        if self._id is not None:
            with only_display("progress"):
                update_progress_artifact(artifact_id=self._id, progress=100.0)


def table_collections(run: RunHandle, stretch: Stretch) -> None:
    """One row per collection of a stretch."""
    deadline = time.monotonic() + ROWS_DEADLINE_S
    while (rows := _rows_of(run, stretch)) and len(rows) < stretch.num_collections:
        # The session writes rows a moment after the update they tell of.
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    key, title = f"{run.key}-collections", stretch.title
    show(
        f"the table of {title}",
        lambda: create_table_artifact(table=rows[-MAX_ROWS:], key=key, description=title),
    )


def _rows_of(run: RunHandle, stretch: Stretch) -> list[dict[str, object]]:
    return [
        {
            "collection": row["step"],
            "reward": _rounded(row["values"].get("rollout/reward_mean")),
            "length": _rounded(row["values"].get("rollout/length_mean")),
            "staleness": _rounded(row["values"].get("rollout/staleness_mean")),
            "mixed groups": row["values"].get("rollout/mixed_groups"),
            "tokens/s": _rounded(row["values"].get("rollout/tokens_per_s")),
            "epoch": row["epoch"],
        }
        for row in _rows(run)
        if stretch.first_collection <= row["step"] <= stretch.last_collection
    ]


def summarise(run: RunHandle) -> str:
    """Write the summary of a run as Markdown; returns it."""
    view = workflow.read(run.root)
    lines = [f"# {run.name}", ""]
    if view is not None:
        lines += [
            f"- state: **{view.state}**" + (f", {view.activity}" if view.activity else ""),
            f"- update: {view.update}, ended by {view.ended_by or '-'}",
            "- seen: " + _counts(view.seen) + "; expected: " + _counts(view.expected),
            f"- outstanding: {', '.join(view.outstanding) or 'nothing'}",
        ]
    lines += ["", "| evaluation | mean |", "|---|---|"]
    lines += [f"| {name} | {mean:.4f} |" for name, mean in _evaluations(run)]
    lines += ["", f"- report: [report.html]({run.report().as_uri()})"]
    lines += [f"- run directory: `{run.root.path}`", f"- export: `{run.root.export}`"]
    text = "\n".join(lines)
    key = f"{run.key}-summary"
    show(
        "the summary",
        lambda: create_markdown_artifact(markdown=text, key=key, description="summary"),
    )
    return text


def _evaluations(run: RunHandle) -> Iterator[tuple[str, float]]:
    """Means of the results that stand, by policy and set."""
    for _, receipt in receipts_of(run.root, Chain(run.root).read()):
        if receipt.stands and receipt.result is not None:
            asked = receipt.request
            yield f"{asked.policy} {asked.set}", receipt.result.metrics["mean"]


def _rows(run: RunHandle) -> Iterator[dict[str, Any]]:
    """Rows of the rollout axis; of a collection that was made twice, the highest epoch."""
    newest: dict[float, dict[str, Any]] = {}
    path = run.root.path / "metrics.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if '"rollout/collection"' not in line or not line.endswith("\n"):
                    continue
                with suppress(ValueError):  # half a line is what a full disk or a kill leaves
                    row = json.loads(line)
                    newest[row["step"]] = _newer(row, newest.get(row["step"]))
    yield from (newest[step] for step in sorted(newest))


def _newer(row: dict[str, Any], standing: dict[str, Any] | None) -> dict[str, Any]:
    return row if standing is None or row["epoch"] >= standing["epoch"] else standing


def _rounded(value: object) -> float | None:
    return round(value, 4) if isinstance(value, int | float) else None


def _counts(counts: workflow.Counts) -> str:
    return ", ".join(f"{value} {name}" for name, value in counts.model_dump().items())
