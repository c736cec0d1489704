"""What proves that a step is done: the chain, and files that are judged against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from runtime.evaluation.reading import standing_result
from runtime.policy import PolicyId
from runtime.rundir import atomic, history
from runtime.rundir.layout import EXPORT_RECEIPT, RunRoot
from runtime.rundir.receipts import Receipt, read_receipt
from runtime.rundir.records import CommitRecord, Record
from runtime.rundir.workflow import Workflow
from runtime.session.steps import Step, StepKind

Records = tuple[Record, ...]


def receipt_of(
    step: Step, root: RunRoot, records: Records, view: Workflow | None
) -> Receipt | None:
    """The receipt of a step that stands, or None.

    A step beyond the actual end of a complete run is done, at the update the run ended with.

    Args:
        step: which.
        root: the run.
        records: the whole chain.
        view: the present epoch's workflow view, or None.
    """
    if step.update is not None and (end := _actual_end(step.update, records)) is not None:
        return end.model_copy(update={"step": str(step)})
    match step.kind:
        case StepKind.PREPARE:
            return _prepared(root)
        case StepKind.RENDEZVOUS:
            return _rendezvous(records, view)
        case StepKind.SEGMENT:
            return _segment(step, records, view)
        case StepKind.CHECKPOINT:
            return _checkpoint(step, records)
        case StepKind.EVALUATION:
            return _evaluation(step, root, records)
        case StepKind.EXPORT:
            return _export(step, root, records)
        case StepKind.CACHE:
            return read_receipt(root, str(step))
        case StepKind.FINISH:
            return _finish(records)


def _actual_end(update: int, records: Records) -> Receipt | None:
    end = history.current_end(records)
    if end is None or end.state != "complete" or update <= end.update:
        return None
    detail: dict[str, JsonValue] = {"ended_by": end.ended_by, "beyond_end": True}
    return Receipt(step="finish", epoch=end.epoch, update=end.update, time=end.time, detail=detail)


def _prepared(root: RunRoot) -> Receipt | None:
    # What was prepared is frozen: no rewind goes below it.
    found = _json(root.prepared / "receipt.json")
    if found is None:
        return None
    return Receipt(step="prepare", epoch=0, update=0, time=_number(found, "time"), detail=found)


def _rendezvous(records: Records, view: Workflow | None) -> Receipt | None:
    epoch = history.newest_epoch(records)
    if epoch is None:
        return None
    has_committed = isinstance(records[-1], CommitRecord)
    trains = view is not None and view.state == "training" and view.activity != "resuming"
    is_live = history.current_end(records) is None and (has_committed or trains)
    if not (is_live or history.is_complete(records)):
        return None
    return Receipt(
        step="rendezvous",
        epoch=epoch.epoch,
        update=max(0, epoch.restored_update),
        time=epoch.time,
        detail={"attempt": epoch.attempt, "host": epoch.host, "restored": epoch.restored},
    )


def _segment(step: Step, records: Records, view: Workflow | None) -> Receipt | None:
    if (receipt := _checkpoint(step, records)) is not None:
        return receipt
    # Trained, and its commit is being written: the checkpoint step waits for that.
    is_live = history.current_end(records) is None
    if is_live and view is not None and step.update is not None and view.update >= step.update:
        return Receipt(
            step=str(step), epoch=view.epoch, update=view.update, time=view.progress.time
        )
    return None


def _checkpoint(step: Step, records: Records) -> Receipt | None:
    """Any standing commit at or after the update will do: the first of them."""
    for commit in history.standing_commits(records):
        if step.update is not None and commit.update >= step.update:
            return Receipt(
                step=str(step),
                epoch=commit.epoch,
                update=commit.update,
                time=commit.time,
                detail={"policy": commit.policy, "folder": commit.folder, "seq": commit.seq},
            )
    return None


def _evaluation(step: Step, root: RunRoot, records: Records) -> Receipt | None:
    """A result counts once its update is committed, and if its policy belongs to history."""
    if step.update is None or step.set_name is None:
        return None
    if history.committed_update(records) < step.update:
        return None
    found = standing_result(root, records, update=step.update, set_name=step.set_name)
    if found is None or found[1].result is None:
        return None
    folder, receipt = found
    result = found[1].result
    return Receipt(
        step=str(step),
        epoch=PolicyId.parse(receipt.request.policy).epoch,
        update=step.update,
        time=result.time,
        detail={"path": str(folder), **result.model_dump(mode="json")},
    )


def _export(step: Step, root: RunRoot, records: Records) -> Receipt | None:
    if step.update is None:
        return None
    for folder in (root.export_at(step.update), root.export):
        found = _json(folder / EXPORT_RECEIPT)
        if found is None or found.get("update") != step.update:
            continue
        policy = PolicyId.parse(str(found.get("policy")))
        if history.is_standing(records, policy):
            return Receipt(
                step=str(step),
                epoch=policy.epoch,
                update=policy.update,
                time=_number(found, "time"),
                detail={"path": str(folder), **found},
            )
    return None


def _finish(records: Records) -> Receipt | None:
    end = history.current_end(records)
    if end is None or end.state != "complete":
        return None
    return Receipt(
        step="finish",
        epoch=end.epoch,
        update=end.update,
        time=end.time,
        detail={"ended_by": end.ended_by},
    )


def _json(path: Path) -> dict[str, JsonValue] | None:
    data = atomic.read_bytes(path)
    try:
        found: object = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return cast("dict[str, JsonValue]", found) if isinstance(found, dict) else None


def _number(found: dict[str, JsonValue], name: str) -> float:
    value = found.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
