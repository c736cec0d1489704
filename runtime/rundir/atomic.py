"""Files that are there whole or not at all.

Readers ignore names that start with a dot: those are temporary files, torn ones too.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime import faults
from runtime.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

probe: Callable[[str, Path], None] | None = None if faults.plan is None else faults.plan.file
"""Fault point: called with (operation, path) before each file operation; None in production.

Operations: ``write``, ``fsync``, ``link``, ``replace``, ``unlink``, ``fsync_folder``, ``append``.
"""


def point(operation: str, path: Path) -> None:
    """Consult the fault probe, if one is set."""
    if probe is not None:
        probe(operation, path)


def write_new(path: Path, data: bytes) -> None:
    """Create ``path`` exclusively and durably, by link: it exists whole, or not at all.

    Safe against any number of writers on any number of hosts that share the file system.

    Raises:
        FileExistsError: if somebody else made the name first; nothing was written then.
        DiskFull: if there was no space; nothing was written then.
        OSError: on any other trouble; after a failed fsync of the folder the file may be there.
    """
    with _temporary(path) as temporary:
        _fill(temporary, data, durable=True)
        point("link", path)
        try:
            # A folder can be full too: its new entry may need a block.
            with disk_full_as_error(path):
                os.link(temporary, path)
        except FileExistsError:
            # A network file system may answer "exists" to our own link if its answer got lost.
            if not temporary.samefile(path):
                raise
    fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace ``path`` by ``data`` in one step; the last of several writers wins.

    Args:
        path: where to; its folder exists.
        data: the whole new content.
        durable: fsync file and folder, so that it survives a loss of power.

    Raises:
        DiskFull: if there was no space; the old content stands then.
    """
    with _temporary(path) as temporary:
        _fill(temporary, data, durable=durable)
        point("replace", path)
        temporary.replace(path)
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, payload: object, *, durable: bool = False) -> None:
    """``write_bytes`` of the payload as indented JSON with sorted keys."""
    text = json.dumps(payload, indent=1, sort_keys=True, ensure_ascii=False)
    write_bytes(path, text.encode() + b"\n", durable=durable)


def read_bytes(path: Path) -> bytes | None:
    """The content, or None where the file does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    point("fsync_folder", folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def disk_full_as_error(path: Path) -> Generator[None]:
    """Turn "no space", "over quota" and "file too large" into DiskFull; other errors pass.

    Raises:
        DiskFull: naming the path.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFull(f"no space to write {path}: {error.strerror}", path=str(path)) from error


@contextmanager
def _temporary(path: Path) -> Generator[Path]:
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        yield temporary
    finally:
        point("unlink", temporary)
        with suppress(FileNotFoundError):
            temporary.unlink()


def _fill(temporary: Path, data: bytes, *, durable: bool) -> None:
    with disk_full_as_error(temporary):
        point("write", temporary)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                point("fsync", temporary)
                os.fsync(file.fileno())
