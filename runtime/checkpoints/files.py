"""Files of a commit: their names, sizes and digests, made durable and verified.

Names in a commit record are relative to the commit's folder; those that begin with ``ledger/`` are
relative to the output root, since a ledger segment outlives the commit's folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.rundir import atomic
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, FileEntry

FORMAT_VERSION = 1
"""Of a commit's files: which there are, and what is in them."""
LEDGER = "ledger"
INITIAL = "initial.json"
"""In commit 0: where the model came from. No trainer state lies beside it."""
_CHUNK = 8 << 20


def segment_name(update: int, epoch: int) -> str:
    """Name of a ledger segment in a commit record, ``ledger/000050-e3.seg``."""
    return f"{LEDGER}/{update:06d}-e{epoch}.seg"


def locate(root: RunRoot, commit: CommitRecord, name: str) -> Path:
    """Where a file of a commit lies."""
    if name.startswith(f"{LEDGER}/"):
        return root.path / name
    return root.path / commit.folder / name


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    sha = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            sha.update(view[:n])
    return sha.hexdigest()


def seal(
    paths: Sequence[tuple[str, Path]], known: Mapping[str, str | None] | None = None
) -> tuple[FileEntry, ...]:
    """Make files durable and describe them; digests are computed while the disk still writes.

    Args:
        paths: (name in the record, where the file lies), each written and closed.
        known: SHA-256 by name, of files that were hashed while they were written.

    Raises:
        OSError: if a file is missing or cannot be synced; "no space" among them, for what was only
            in memory so far.
    """
    with ThreadPoolExecutor(worker_threads(2 * len(paths))) as pool:
        synced = [pool.submit(_fsync, path) for _, path in paths]
        given = known or {}
        digests = [pool.submit(_digest_once, given.get(name), path) for name, path in paths]
        for future in synced:
            future.result()
        return tuple(
            FileEntry(name=name, size=path.stat().st_size, sha256=future.result())
            for (name, path), future in zip(paths, digests, strict=True)
        )


def _digest_once(known: str | None, path: Path) -> str:
    return digest(path) if known is None else known


def damage(root: RunRoot, commit: CommitRecord) -> list[str]:
    """Say what is wrong with a commit's files; empty when all are as the record says.

    Sizes come first: a torn commit is found without reading the large files.
    """
    return damage_of([(entry, locate(root, commit, entry.name)) for entry in commit.files])


def damage_of(located: Sequence[tuple[FileEntry, Path]]) -> list[str]:
    """Say which of these files are not as their entries say; sizes first, then digests."""
    if wrong := [text for entry, path in located if (text := _wrong_size(entry, path))]:
        return wrong
    return _each(lambda item: _wrong_digest(*item), located)


def remove_folder(folder: Path) -> None:
    """Delete a folder's files and the folder. Missing is no error; other trouble raises OSError."""
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_folder(path)
            continue
        atomic.point("unlink", path)
        path.unlink(missing_ok=True)
    atomic.point("rmdir", folder)
    folder.rmdir()


def _each(
    check: Callable[[tuple[FileEntry, Path]], str | None], located: Sequence[tuple[FileEntry, Path]]
) -> list[str]:
    with ThreadPoolExecutor(worker_threads(len(located))) as pool:
        found: Iterable[str | None] = pool.map(check, located)
        return [text for text in found if text is not None]


def _wrong_size(entry: FileEntry, path: Path) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as exc:
        return f"{entry.name}: {exc.strerror}"
    return (
        None if size == entry.size else f"{entry.name}: {size} bytes, the record says {entry.size}"
    )


def _wrong_digest(entry: FileEntry, path: Path) -> str | None:
    try:
        found = digest(path)
    except OSError as exc:
        return f"{entry.name}: {exc.strerror}"
    if found == entry.sha256:
        return None
    return f"{entry.name}: sha256 {found[:12]}..., the record says {entry.sha256[:12]}..."


def _fsync(path: Path) -> None:
    atomic.point("fsync", path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def worker_threads(tasks: int) -> int:
    """How many threads may read, hash and sync at once; never more than tasks or 8."""
    return max(1, min(tasks, 8, (os.cpu_count() or 1) + 1))
