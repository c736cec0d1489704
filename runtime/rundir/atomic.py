"""Files that are there whole or not at all.

Readers ignore names that start with a dot: those are temporary files, torn ones too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from runtime import faults
from runtime.errors import DiskFull
from runtime.rundir import enter

_DRAFT = re.compile(r"\..+\.([0-9a-f]{8})\.(\d+)\.[0-9a-f]{8}\.tmp")
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


def draft(path: Path) -> Path:
    """A name beside ``path`` for its content while it is being written; says who writes."""
    return path.parent / f".{path.name}.{_here()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def sweep(folder: Path) -> list[Path]:
    """Delete drafts below ``folder`` whose writers, on this host, are dead; returns which.

    Of another host's writer nothing is known, so its drafts stay.
    """
    swept: list[Path] = []
    for path in sorted(folder.rglob(".*.tmp")):
        found = _DRAFT.fullmatch(path.name)
        if found and found[1] == _here() and enter.started(int(found[2])) is None:
            with suppress(OSError):
                path.unlink()
                swept.append(path)
    return swept


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


@cache
def _here() -> str:
    """Names the space in which a pid means something, in eight digits."""
    text = f"{socket.gethostname()}/{enter.boot_id()}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@contextmanager
def _temporary(path: Path) -> Generator[Path]:
    temporary = draft(path)
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
