"""Scratch folders in memory, of an owner that can be seen to be dead.

An owner holds a lock on a file in its folder for as long as it lives. The kernel lets go of it
however the owner ends, so a folder whose lock can be taken has no owner, whatever its pid means by
now.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "milepost-"
_LOCK = "owner.lock"


def scratch_root() -> Path:
    """Memory-backed where the host has it, else the temporary folder."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Scratch:
    """One owner's folder, ``<root>/milepost-<8 hex digits>``."""

    def __init__(self, root: Path) -> None:
        name = _PREFIX + secrets.token_hex(4)
        making = root / f".{name}"
        making.mkdir(mode=0o700)
        self._lock = os.open(making / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The final name appears with its lock already held, so no sweeper takes it for an orphan.
        self.path = making.rename(root / name)

    def close(self) -> None:
        """Delete the folder. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def sweep(root: Path) -> list[Path]:
    """Delete the folders of dead owners; returns which. Folders of other users are left alone."""
    swept: list[Path] = []
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        with suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(folder)
                swept.append(folder)
            finally:
                os.close(lock)
    return swept
