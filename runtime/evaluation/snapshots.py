"""The weights a background evaluation reads: found, proved, made from a commit, and let go.

A snapshot is an HF export with its receipt. Which folder it lies in decides nothing: any export of
the same policy whose weights have the same digest will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from runtime.checkpoints.export import (
    ExportReceipt,
    Restoring,
    export_commit,
    export_damage,
    read_receipt,
    weights_digest,
)
from runtime.checkpoints.files import remove_folder
from runtime.checkpoints.resume import restorable_at
from runtime.errors import RunError, StoreError
from runtime.evaluation.reading import receipts_of
from runtime.evaluation.records import Request, Snapshot
from runtime.policy import PolicyId
from runtime.rundir import atomic, history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record
from runtime.telemetry.events import Event

_log: structlog.stdlib.BoundLogger = structlog.get_logger("evaluation")


class SnapshotMissing(StoreError):
    """The weights an evaluation was asked for are gone, or are not those any more."""

    next_check = "milepost export RUN --update N, then milepost resubmit-evaluations RUN --force"


class SnapshotFailed(StoreError):
    """No snapshot could be written from the commit."""

    next_check = "free disk; the commit's files; milepost export RUN --update N"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A snapshot that was looked at byte by byte."""

    folder: Path
    receipt: ExportReceipt


def snapshot_of(folder: Path, receipt: ExportReceipt, *, is_leased: bool) -> Snapshot:
    """What a request says about an export that stands.

    Args:
        folder: where it lies.
        receipt: its own.
        is_leased: retention would delete it, and spares it while the evaluation is not settled.
    """
    lease = receipt.policy if is_leased else None
    return Snapshot(path=str(folder), digest=weights_digest(receipt), lease=lease)


def find_weights(root: RunRoot, records: tuple[Record, ...], request: Request) -> Weights | None:
    """The weights of a request, proved; None where no snapshot was ever written.

    Blocks on the disk: reads every byte.

    Raises:
        SnapshotMissing: if there was one and every export of that policy is gone or damaged.
    """
    problems: list[str] = []
    update = PolicyId.parse(request.policy).update
    for folder in _candidates(root, request):
        receipt = read_receipt(folder)
        if receipt is None or not receipt.is_model or not _is_of(receipt, request, records):
            continue
        if request.snapshot is not None and weights_digest(receipt) != request.snapshot.digest:
            problems.append(f"{folder} holds other weights")
        elif damage := export_damage(folder, receipt):
            problems.append(f"{folder}: {damage[0]}")
        else:
            return Weights(folder=folder, receipt=receipt)
    if request.snapshot is None and not problems:
        return None
    what = "; ".join(problems) or f"{request.snapshot.path if request.snapshot else ''} is gone"
    raise SnapshotMissing(
        f"snapshot of {request.policy}: {what}; make a new one with "
        f"milepost export {root.path} --update {update}",
        policy=request.policy,
    )


async def make_weights(
    root: RunRoot,
    records: tuple[Record, ...],
    request: Request,
    *,
    model: Path,
    trainer: Restoring,
) -> Weights:
    """Export the request's commit into ``snapshots/``, through a trainer that holds nothing yet.

    Raises:
        SnapshotMissing: if its commit is gone too.
        SnapshotFailed: if the export could not be written, or the commit cannot be read.
    """
    policy = PolicyId.parse(request.policy)
    try:
        restorable = await anyio.to_thread.run_sync(restorable_at, root, records, policy.update)
    except RunError as error:
        raise SnapshotFailed(f"{policy}: {error.message}", policy=str(policy)) from error
    if restorable is None:
        raise SnapshotMissing(
            f"neither a snapshot nor a commit of {policy} is left: it cannot be evaluated any more",
            policy=str(policy),
        )
    folder = root.snapshots / str(policy)
    folder.parent.mkdir(exist_ok=True)
    try:
        receipt = await export_commit(
            root,
            trainer,
            restorable,
            model=model,
            epoch=policy.epoch,
            to=folder,
        )
    except StoreError as error:
        raise SnapshotFailed(f"{policy}: {error.message}", policy=str(policy)) from error
    return Weights(folder=folder, receipt=receipt)


def pinned_policies(root: RunRoot, records: tuple[Record, ...]) -> set[str]:
    """Policies whose commits evaluations may still need to be exported from."""
    return {
        receipt.request.policy
        for _, receipt in receipts_of(root, records)
        if receipt.request.snapshot is None and not receipt.is_settled
    }


def release_snapshots(root: RunRoot, epoch: int) -> tuple[str, ...]:
    """Delete the snapshots that no unsettled evaluation needs; only the owner of the run may.

    Idempotent; what cannot be deleted is left to the next call.

    Returns:
        Policy ids whose snapshots went.

    Raises:
        FencedError: if a newer owner exists; nothing was deleted.
    """
    if not root.snapshots.is_dir():
        return ()
    records = Chain(root).check(epoch)
    gone: list[str] = []
    for folder in sorted(path for path in root.snapshots.iterdir() if path.is_dir()):
        try:
            if folder.name.startswith("."):
                if not folder.name.endswith(".writing"):
                    remove_folder(folder)
                continue
            found = list(receipts_of(root, records, str(PolicyId.parse(folder.name))))
            if not found or not all(receipt.is_settled for _, receipt in found):
                continue  # without a request it has just been written, and is about to get one
            trash = folder.with_name(f".{folder.name}.deleted")
            atomic.point("rename", folder)
            folder.rename(trash)
            gone.append(folder.name)
            remove_folder(trash)
        except (OSError, ValueError) as error:
            _log.warning(Event.CHECKPOINT_LEFTOVER, path=str(folder), error=str(error))
    return tuple(gone)


def _is_of(receipt: ExportReceipt, request: Request, records: tuple[Record, ...]) -> bool:
    """Whether an export holds the request's policy; a resumed session restored the same weights."""
    found, wanted = PolicyId.parse(receipt.policy), PolicyId.parse(request.policy)
    return found == wanted or (
        found.update == wanted.update and history.is_standing(records, found)
    )


def _candidates(root: RunRoot, request: Request) -> Iterator[Path]:
    update = PolicyId.parse(request.policy).update
    if request.snapshot is not None:
        yield Path(request.snapshot.path)
    yield root.snapshots / request.policy
    yield root.export_at(update)
    yield root.export
