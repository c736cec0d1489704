"""The private folder on local disk that an attempt's Ray works in; knows no Ray itself."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from runtime.errors import SessionLost

CACHES_VARIABLE = "MILEPOST_CACHES"
"""Names the folder of a session's caches, the same on each node, to all its processes."""
_SOCKET_PATH_LIMIT = 107
# What Ray puts behind its temp dir: /session_<date>_<time>_<micros>_<pid>/sockets/plasma_store
_RAY_SUFFIX = 75


def run_key(root: Path) -> str:
    """A short name of an output root."""
    return hashlib.sha256(str(root).encode()).hexdigest()[:10]


def scratch_folder(run_key: str, epoch: int) -> Path:
    """A short private folder on local disk for sockets and Ray's logs.

    Args:
        run_key: short digest of the output root; keeps two runs apart.
        epoch: older epochs' folders of the same run are swept when a newer one starts.
    """
    base = _base()
    private_folder(base)
    folder = base / f"{run_key}-{epoch}"
    if len(str(folder)) + _RAY_SUFFIX > _SOCKET_PATH_LIMIT:
        raise SessionLost(
            f"temp folder {folder} is too long for Ray's sockets; set TMPDIR to a short path",
            folder=str(folder),
        )
    for older in base.glob(f"{run_key}-*"):
        # Only the owner of the newest epoch gets here, so an older folder has no living user.
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def private_folder(folder: Path) -> None:
    """Make a folder of this user alone, whose name others can guess. Idempotent.

    Raises:
        SessionLost: if somebody else made it, or can look into it, or its own folder is missing.
    """
    try:
        # What stands in its place, a file or a link to nowhere, is looked at below.
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except FileNotFoundError as error:
        raise SessionLost(
            f"{folder} has no place on {socket.gethostname()}: {folder.parent} is not there; make "
            "it on every node, or set TMPDIR to what all of them have",
            folder=str(folder),
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        # Whoever made it first would choose the token of our Ray, and what our compilers run.
        raise SessionLost(
            f"{folder} on {socket.gethostname()} is not a folder of this user alone; remove it "
            "or set TMPDIR",
            folder=str(folder),
        )


def remove_scratch(key: str) -> None:
    """Delete the folders of all epochs of a run, once none of their processes lives. Idempotent."""
    for folder in _base().glob(f"{key}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _base() -> Path:
    return Path(tempfile.gettempdir()) / f"mp-{os.getuid()}"
