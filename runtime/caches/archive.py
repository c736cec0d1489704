"""A folder as one file: equal folders give equal bytes, and only plain files come out again.

A normalised tar in zstd: names sorted, owner and times 0, no links, no devices. The few small
files in which a compiler wrote down where its own files lie say the new place when they come out.
"""

# pyarrow ships no types: what comes out of it is Unknown, here and nowhere else.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Self, cast

import pyarrow as pa

from runtime.caches import ninja
from runtime.checkpoints.files import digest
from runtime.errors import StoreError
from runtime.rundir import atomic

MAX_BYTES = 64 << 30
"""Unpacked; more is no compiler cache."""
MAX_FILES = 1_000_000
MAX_GROWTH = 200
"""Unpacked bytes for each packed one, past ``FREE_BYTES``: kernels pack to a fifth, zeros to
nothing."""
FREE_BYTES = 64 << 20
NAME_PATHS = ("__grp__*", ninja.BUILD_FILE)
"""Files that name others by their whole path: Triton's lists of what a kernel is, where a path that
is not there is a kernel that is compiled again, and what ninja was told."""
_MAX_PATHS = 64 << 10
_FOLDER = b"@FOLDER@"
_NAME_ENDS = rb"(?![\w.+@%~\\\x80-\xff-])"
"""``/part`` and ``/part/x`` are meant, ``/part2`` and ``/part.old`` are others'."""
_MAX_HEADER = 64 << 10
"""Of a long name; a reader holds all of it in memory."""


class BadArchive(StoreError):
    """An archive that is not what its manifest says, or holds what no cache holds."""

    next_check = "delete the archive named here; the next run publishes it anew"


class _Member(tarfile.TarInfo):
    """A member's header, refused before a reader acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        is_name = found.type == tarfile.XHDTYPE and found.size <= _MAX_HEADER
        if not (is_name or found.type in (tarfile.REGTYPE, tarfile.AREGTYPE)):
            raise BadArchive(f"{found.name!r} of type {found.type!r} has no business in a cache")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An archive on local disk."""

    path: Path
    sha256: str
    size: int
    num_files: int


def pack(folder: Path, to: Path) -> Packed:
    """Write the plain files below ``folder`` into one archive; links and the like are left out.

    Files that vanish while they are read (a compiler's temporary ones) are left out too.

    Raises:
        DiskFull: if there is no room.
    """
    num_files = 0
    here = re.compile(re.escape(_in_json(folder)) + _NAME_ENDS)
    with (
        atomic.disk_full_as_error(to),
        pa.CompressedOutputStream(str(to), "zstd") as stream,
        tarfile.open(
            fileobj=cast("IO[bytes]", stream), mode="w|", format=tarfile.PAX_FORMAT
        ) as tar,
    ):
        for path in _files(folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            if _names_paths(path):
                # What stays long is left as it is: it is not rewritten when it comes out either.
                short = here.sub(_FOLDER, content)
                content = short if len(short) <= _MAX_PATHS else content
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size = len(content)
            # Inductor runs what it compiled, so the mark that says so is part of the content.
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(info, io.BytesIO(content))
            num_files += 1
    return Packed(path=to, sha256=digest(to), size=to.stat().st_size, num_files=num_files)


def unpack(archive: Path, to: Path, *, sha256: str) -> int:
    """Extract into ``to``, which appears whole or not at all; returns how many files.

    Args:
        archive: as ``pack`` wrote it, from a store that others can write.
        to: must not exist.
        sha256: of the archive, from its manifest; looked at before anything is read from it.

    Raises:
        BadArchive: if digest or content are wrong; nothing is left behind.
        DiskFull: if there is no room.
    """
    if (found := digest(archive)) != sha256:
        raise BadArchive(f"{archive.name}: sha256 {found[:12]}, its manifest says {sha256[:12]}")
    staging = to.with_name(f".{to.name}.unpacking")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with atomic.disk_full_as_error(to):
            num_files, rewritten = _extract(archive, staging, lies_in=to)
            ninja.mark(path for path in rewritten if path.name == ninja.BUILD_FILE)
            staging.rename(to)
    except (
        tarfile.TarError, EOFError, pa.ArrowInvalid,
        FileExistsError, NotADirectoryError, IsADirectoryError,  # a name twice, or below a file
    ) as error:  # fmt: skip
        raise BadArchive(f"{archive.name}: {error}") from error
    except OSError as error:
        if error.errno is not None:  # the system's own trouble, not the decompressor's
            raise
        raise BadArchive(f"{archive.name}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return num_files


def _extract(archive: Path, to: Path, *, lies_in: Path) -> tuple[int, list[Path]]:
    """Into ``to``, which is renamed to ``lies_in`` afterwards.

    Returns:
        How many files, and which of them say the new place now.
    """
    to.mkdir(parents=True)
    rewritten: list[Path] = []
    num_files = num_bytes = 0
    most = min(MAX_BYTES, FREE_BYTES + MAX_GROWTH * archive.stat().st_size)
    with (
        pa.CompressedInputStream(str(archive), "zstd") as stream,
        tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|", tarinfo=_Member) as tar,
    ):
        for member in tar:
            name = PurePosixPath(member.name)
            is_odd = member.issparse() or name.is_absolute() or ".." in name.parts
            if is_odd or name.name == ninja.MARK:  # the mark says what was looked at here
                raise BadArchive(f"{archive.name}: {member.name!r} has no business in a cache")
            num_files, num_bytes = num_files + 1, num_bytes + member.size
            if num_files > MAX_FILES or num_bytes > most:
                raise BadArchive(f"{archive.name}: more than {MAX_FILES} files or {most} bytes")
            content = tar.extractfile(member)
            assert content is not None
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                if _names_paths(name) and member.size <= _MAX_PATHS:
                    file.write(content.read().replace(_FOLDER, _in_json(lies_in)))
                    rewritten.append(target)
                else:
                    shutil.copyfileobj(content, file)
            target.chmod(0o700 if member.mode & 0o100 else 0o600)
    return num_files, rewritten


def _names_paths(path: PurePath) -> bool:
    return any(path.match(pattern) for pattern in NAME_PATHS)


def _in_json(folder: Path) -> bytes:
    """The folder as it stands inside a string of JSON; elsewhere where its name is plain."""
    return json.dumps(str(folder))[1:-1].encode()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != ninja.MARK:
            yield path
