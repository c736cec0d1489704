"""An attempt on an empty machine: its root is filled from the copy in the object store."""

from __future__ import annotations

import json

from runtime.errors import StoreError
from runtime.rundir import atomic
from runtime.rundir.journal import Journal
from runtime.rundir.layout import AttemptDir
from runtime.telemetry.events import Event


def fill_empty_root(attempt: AttemptDir) -> None:
    """Bring history and newest commit of ``checkpoint.upload`` to a root that has none.

    Does nothing without that field, and nothing where the root has a history: what lies on its own
    disk counts. Before the lease is taken, since the chain says how long one lasts; two attempts
    at once fill it with the same.

    Raises:
        StoreError: if there is a copy and it cannot be brought; nothing was started.
    """
    data = atomic.read_bytes(attempt.run)
    spec = {} if data is None else json.loads(data)
    url = spec.get("checkpoint", {}).get("upload")
    if url is None or any(attempt.root.chain.glob("*.json")):
        return
    # Loads the S3 client: not for a guard that has nothing to fetch.
    from runtime.checkpoints.bucket import Bucket
    from runtime.checkpoints.download import restore_copy

    attempt.root.create()
    journal = Journal(attempt, epoch=0, role="guard")
    try:
        commit = restore_copy(attempt.root, Bucket.of(url))
    except StoreError as error:
        journal.append(Event.ATTEMPT_ENDED, error=error.message, next_check=error.next_check)
        raise
    if commit is not None:
        journal.append(Event.CHECKPOINT_FETCHED, policy=commit.policy, store=url)
