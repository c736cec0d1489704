"""What kind of file system a path lies on."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = (
    "nfs", "cifs", "smb", "fuse", "lustre", "gpfs", "weka", "ceph", "9p", "beegfs", "virtiofs",
)  # fmt: skip


def is_shared(path: Path, mounts: str | None = None) -> bool:
    """Whether a path lies on a network file system, as far as the mount table tells.

    Args:
        path: need not exist yet.
        mounts: content of a mount table; None reads this host's, and without one the answer is no.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
        except OSError:
            return False
    real = os.path.realpath(path)
    longest, kind = "", ""
    for line in mounts.splitlines():
        _, mount, found, *_ = line.split(" ")
        is_above = f"{real}/".startswith(f"{mount.rstrip('/')}/")
        if is_above and len(mount) >= len(longest):
            longest, kind = mount, found
    return kind.startswith(_NETWORK)
