"""The committed tree of a checkout, and whether the checkout is nothing but that."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError, DirtyCheckout

_GIT_DEADLINE_S = 120.0
_MOST_NAMED = 8
# Settings of a user, a machine or a clone (line ends, umask, attributes) must not shape an image;
# what is dirty is judged with them, as the user sees it.
_PLAIN = (
    "-c", "tar.umask=0022", "-c", "core.attributesFile=/dev/null", "-c", "core.autocrlf=false",
    "-c", "core.eol=lf",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A commit, and what lies around it."""

    commit: str
    """Forty hexadecimal digits."""
    time: int
    """Of the commit: seconds since the Unix epoch."""
    dirty: tuple[str, ...]
    """Changed and untracked files, as git status shows them; ignored ones do not count."""

    @property
    def is_dirty(self) -> bool:
        """The checkout is not the commit."""
        return bool(self.dirty)


class Checkout:
    """A git working tree."""

    def __init__(self, path: Path) -> None:
        """Find the tree's top.

        Raises:
            ConfigError: if ``path`` is in no git checkout, or git is missing.
        """
        self.top = path
        # From a folder within, git would archive that folder alone.
        self.top = Path(self._git("rev-parse", "--show-toplevel").decode().strip())

    def revision(self) -> Revision:
        """The commit that is checked out, and what differs from it.

        Raises:
            ConfigError: if there is no commit yet.
        """
        commit, time = self._git("show", "-s", "--format=%H %ct", "HEAD").decode().split()
        status = self._git("status", "--porcelain=v1", "-z", "--untracked-files=all").decode()
        dirty = tuple(entry for entry in status.split("\0") if entry)
        return Revision(commit=commit, time=int(time), dirty=dirty)

    def clean_revision(self) -> Revision:
        """The commit, if the checkout is nothing else.

        Raises:
            DirtyCheckout: naming the files that are changed or untracked.
        """
        revision = self.revision()
        if revision.is_dirty:
            named = ", ".join(entry.strip() for entry in revision.dirty[:_MOST_NAMED])
            more = len(revision.dirty) - _MOST_NAMED
            raise DirtyCheckout(
                f"{self.top} is not the commit {revision.commit[:12]}: {named}"
                + (f" and {more} more" if more > 0 else "")
                + "; an image is built from a commit alone: commit or remove them",
                revision=revision.commit,
                dirty=len(revision.dirty),
            )
        return revision

    def archive(self, revision: Revision, *, prefix: str) -> bytes:
        """The committed tree as an uncompressed layer; the same bytes wherever it is made.

        Owners are 0, times are the commit's, and there is no pax header of git's own, which some
        tools refuse in a layer. Uncompressed: its digest knows no version of zlib.

        Args:
            revision: of this checkout.
            prefix: folder the tree comes under, without slashes at its ends.
        """
        raw = self._archive(revision)
        layer = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(raw)) as committed,
            tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as made,
        ):
            parts = prefix.split("/")
            for depth in range(1, len(parts) + 1):
                made.addfile(_folder("/".join(parts[:depth]), revision.time))
            for member in committed.getmembers():
                data = committed.extractfile(member) if member.isreg() else None
                made.addfile(_plain(member, prefix, revision.time), data)
        return layer.getvalue()

    def export(self, revision: Revision, folder: Path) -> None:
        """Write the committed tree into an empty folder."""
        with tarfile.open(fileobj=io.BytesIO(self._archive(revision))) as tar:
            tar.extractall(folder, filter="data")

    def _archive(self, revision: Revision) -> bytes:
        return self._git(*_PLAIN, "archive", "--format=tar", revision.commit)

    def _git(self, *arguments: str) -> bytes:
        try:
            done = subprocess.run(
                # A checkout that another user owns (a mounted one) is read all the same.
                ["git", "-C", str(self.top), "-c", "safe.directory=*", *arguments],
                env={**os.environ, "LC_ALL": "C"},
                capture_output=True,
                timeout=_GIT_DEADLINE_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise ConfigError("git is not installed: an image is built from a commit") from error
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise ConfigError(
                f"git in {self.top}: {said[-1] if said else arguments[0] + ' failed'}"
            )
        return done.stdout


def _folder(name: str, time: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, time
    return info


def _plain(member: tarfile.TarInfo, prefix: str, time: int) -> tarfile.TarInfo:
    """A member without anything of the machine that archived it."""
    info = tarfile.TarInfo(f"{prefix}/{member.name}")
    info.type, info.mode, info.size = member.type, member.mode, member.size
    info.linkname, info.mtime = member.linkname, time
    return info
