"""A run on an empty machine, from the copy of its commits in an object store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runtime.checkpoints.bucket import Bucket
from runtime.checkpoints.chain_copy import read_copy
from runtime.checkpoints.evidence_copy import fetch_evidence
from runtime.checkpoints.files import damage_of, remove_folder
from runtime.errors import PartialWrite
from runtime.rundir import atomic
from runtime.rundir.history import standing_commits
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, FileEntry, Record

_FOLDER = re.compile(r"checkpoints/\d+-e[1-9]\d*")


def restore_copy(root: RunRoot, bucket: Bucket) -> CommitRecord | None:
    """Bring the newest whole commit of the copy to an output root without history. Idempotent.

    Every byte is checked against the commit record. The chain comes last and at once, so a root
    that was not restored to the end has no history, and the next call begins again.

    Args:
        root: the output root.
        bucket: where the copy is.

    Returns:
        The commit; None where the root has a history of its own, which then counts, or the store
        knows of none. Epochs that ended before commit 0 are brought all the same: their numbers
        are taken.

    Raises:
        StoreUnreachable: if the store does not answer.
        ChainUnreadable: if the copy of the chain has a hole or cannot be read.
        PartialWrite: if there are copies of commits and none is whole.
    """
    if any(root.chain.glob("*.json")):
        return None
    chain = read_copy(bucket)
    records = [record for record, _ in chain]
    commits = standing_commits(records)
    problems: list[str] = []
    for commit in reversed(commits):
        wrong = _fetch_commit(root, bucket, commit)
        if not wrong:
            break
        problems += wrong
    else:
        if not commits:
            if chain:
                _place_chain(root, [data for _, data in chain])
            return None
        raise PartialWrite(f"no commit in {bucket} is whole: {'; '.join(problems)}")
    _fetch_ledger(root, bucket, records, commit)
    fetch_evidence(root, bucket)
    _place_chain(root, [data for _, data in chain])
    return commit


def _fetch_commit(root: RunRoot, bucket: Bucket, commit: CommitRecord) -> list[str]:
    """Bring its files; what is wrong with them, and then none of them stays."""
    if not _FOLDER.fullmatch(commit.folder):
        return [f"{commit.folder!r} is no folder of a commit"]
    final = root.path / commit.folder
    folder = final.with_name(f".{final.name}.restoring")
    remove_folder(folder)
    folder.mkdir(parents=True)
    located: list[tuple[FileEntry, Path]] = []
    for entry in commit.files:
        is_ledger = entry.name.startswith("ledger/")
        path = (root.path if is_ledger else folder) / entry.name
        bucket.fetch(entry.name if is_ledger else f"{commit.folder}/{entry.name}", path)
        located.append((entry, path))
    if wrong := damage_of(located):
        remove_folder(folder)
        return [f"{commit.folder}: {text}" for text in wrong]
    remove_folder(final)
    folder.rename(final)
    atomic.fsync_folder(final.parent)
    return []


def _fetch_ledger(
    root: RunRoot, bucket: Bucket, records: Sequence[Record], commit: CommitRecord
) -> None:
    """The history of prompts, and commit 0, which names the initial model.

    An older piece that is lost is a gap in what can be shown.
    """
    while commit.parent_seq is not None:
        parent = records[commit.parent_seq]
        assert isinstance(parent, CommitRecord)
        for entry in parent.files:
            if entry.name.startswith("ledger/"):
                bucket.fetch(entry.name, root.path / entry.name)
        if parent.parent_seq is None:
            _fetch_commit(root, bucket, parent)
        commit = parent


def _place_chain(root: RunRoot, records: Sequence[bytes]) -> None:
    folder = root.chain.with_name(".chain.restoring")
    remove_folder(folder)
    folder.mkdir(parents=True)
    for seq, data in enumerate(records):
        atomic.write_bytes(folder / f"{seq}.json", data, durable=True)
    atomic.fsync_folder(folder)
    # Over an empty folder only: whoever was faster is left as he is.
    folder.rename(root.chain)
    atomic.fsync_folder(root.path)
