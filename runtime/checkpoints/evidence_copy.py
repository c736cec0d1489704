"""The copy of evidence in an object store: what a finished run must show beside its commits."""

from __future__ import annotations

import re

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.files import digest
from runtime.rundir.layout import RunRoot

_FOLDERS = ("rollouts", "evaluations")
_EPOCH = re.compile(r"[-/]e([1-9]\d*)[./]")
"""In a name, ``rollouts/000012-e3.parquet`` or ``evaluations/e3.u50/held/request.json``."""


def send_evidence(root: RunRoot, bucket: Bucket, *, up_to_epoch: int) -> int:
    """Send what is not there yet; files are written once, under names of their own. Idempotent.

    Args:
        root: the output root.
        bucket: where to.
        up_to_epoch: the newest the store knows of. What bears a later number waits: should this
            machine be lost, another would give that number to an epoch of its own.

    Returns:
        Bytes sent.
    """
    sent = 0
    for folder in _FOLDERS:
        there = set(bucket.names(f"{folder}/"))
        for path in sorted((root.path / folder).rglob("*")):
            if not path.is_file() or path.name.startswith(".") or ".partial" in path.name:
                continue
            name = path.relative_to(root.path).as_posix()
            epoch = _EPOCH.search(name)
            if epoch is not None and int(epoch[1]) > up_to_epoch:
                continue
            # A log of items still grows: it is sent again; everything else has its last content.
            if name not in there or path.suffix == ".jsonl":
                bucket.send(name, path, sha256=digest(path))
                sent += path.stat().st_size
    return sent


def fetch_evidence(root: RunRoot, bucket: Bucket) -> None:
    """Bring all of it to an output root."""
    for folder in _FOLDERS:
        for name in bucket.names(f"{folder}/"):
            if ".." not in name.split("/"):
                bucket.fetch(name, root.path / name)
