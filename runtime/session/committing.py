"""What a commit of this session sets off: the ledger told, copies sent, old ones deleted."""

from __future__ import annotations

from collections.abc import Collection

import anyio
import anyio.to_thread

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.commit import Committer
from runtime.checkpoints.copied import is_copied, read_copied
from runtime.checkpoints.retention import retain
from runtime.checkpoints.uploads import Uploads
from runtime.data.segments import LedgerSegment
from runtime.evaluation.snapshots import pinned_policies
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord
from runtime.session.books import Books
from runtime.session.ground import Ground
from runtime.session.restoring import Standing
from runtime.telemetry.events import Event
from runtime.trainer.group import TrainerGroup


def make_uploads(ground: Ground, standing: Standing) -> Uploads | None:
    """Copies of commits in an object store; None where none are asked for.

    What was restored is the first to be copied, unless it is known to be there: whoever committed
    it may have died over its copy, or the receipt of it with another machine.
    """
    root, checkpoint = ground.context.root, ground.context.spec.checkpoint
    if checkpoint.upload is None:
        return None
    uploads = Uploads(
        root,
        Bucket.of(checkpoint.upload),
        keep=checkpoint.keep,
        record=ground.recorder.lifecycle.record,
    )
    restored = None if standing.found is None else standing.found.commit
    if restored is not None and not is_copied(
        read_copied(root), restored, upload=checkpoint.upload
    ):
        uploads.committed(restored)
    return uploads


def make_committer(
    ground: Ground,
    standing: Standing,
    trainer: TrainerGroup,
    books: Books,
    uploads: Uploads | None,
) -> Committer:
    """Writes commits beside training."""
    context, lifecycle = ground.context, ground.recorder.lifecycle
    keep = context.spec.checkpoint.keep

    async def committed(record: CommitRecord, segment: LedgerSegment) -> None:
        standing.ledger.committed(segment)
        ground.view.moved(f"commit {record.update}")
        lifecycle.record(Event.CHECKPOINT_COMMITTED, update=record.update, policy=record.policy)
        copying: Collection[str] = ()
        if uploads is not None:
            uploads.committed(record)
            copying = uploads.pinned
        for name in await anyio.to_thread.run_sync(
            _retain, context.root, context.epoch, keep, copying
        ):
            lifecycle.record(Event.CHECKPOINT_DELETED, folder=name)

    return Committer(
        root=context.root,
        epoch=context.epoch,
        identity=standing.identity,
        source=trainer,
        tasks=ground.tasks,
        on_committed=committed,
        parent=None if standing.found is None else standing.found.commit,
        clock=context.clock,
        before_record=books.kept,
    )


def _retain(root: RunRoot, epoch: int, keep: int, copying: Collection[str]) -> tuple[str, ...]:
    pinned = {*pinned_policies(root, Chain(root).read()), *copying}
    return retain(root, epoch, keep=keep, pinned=pinned)
