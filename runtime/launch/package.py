"""The checkout as an archive, for clusters whose image has no Milepost in it."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError

_OLDEST = (1980, 1, 1, 0, 0, 0)
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A zip archive; the same files give the same bytes."""

    content: bytes
    digest: str
    """SHA-256, hexadecimal."""


def pack_checkout(top: Path) -> Package:
    """Everything of a checkout that git does not ignore, as it lies there.

    Args:
        top: of a git working tree.

    Raises:
        ConfigError: if it is none, or too large to travel with a job.
    """
    done = subprocess.run(
        ["git", "-C", str(top), "-c", "safe.directory=*", "ls-files", "-z", "--cached",
         "--others", "--exclude-standard"],
        capture_output=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(
            f"{top} is no git checkout, so its code cannot travel with a job: build an image of it "
            "(milepost image build) and name that in launch.image"
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(filter(None, done.stdout.decode().split("\0"))):
            path = top / name
            if not path.is_file():
                continue  # deleted here, and still in the index
            info = zipfile.ZipInfo(name, _OLDEST)
            info.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    content = packed.getvalue()
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            f"{top} packs to {len(content) / 2**20:.0f} MiB, more than travels with a job "
            f"({_MOST_BYTES / 2**20:.0f} MiB): ignore large files in git, or build an image"
        )
    return Package(content=content, digest=hashlib.sha256(content).hexdigest())
