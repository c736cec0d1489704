"""Where archives are kept: a shared folder, or an object store. The first publisher of a name wins.

An archive lies under its digest, and a manifest, created exclusively and last, names it: whoever
finds a manifest finds a whole archive, and two publishers at once leave one of each.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.caches.archive import BadArchive, Packed
from runtime.checkpoints.bucket import SCHEME, Bucket
from runtime.rundir import atomic


class Manifest(BaseModel):
    """What is published under a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    archive: str = Field(pattern=r"^[0-9a-f]{64}\.tar\.zst$")
    """Its name in the store."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0)
    num_files: int
    by: str
    """Run and attempt that published it."""
    time: float


class CacheStore(Protocol):
    """A place for archives. Blocks; each call is bounded by the store's own timeouts at best."""

    def find(self, name: str) -> Manifest | None:
        """What is published under a name; None where nothing is. BadArchive if damaged."""
        ...

    def fetch(self, manifest: Manifest, to: Path) -> None:
        """Copy the archive to local disk; its digest is not looked at."""
        ...

    def publish(self, name: str, packed: Packed, manifest: Manifest) -> bool:
        """Publish; False where somebody else was first, and nothing of ours is left then."""
        ...


class FolderStore:
    """Archives in a shared folder; implements CacheStore."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> Manifest | None:
        """See CacheStore."""
        return _read(name, atomic.read_bytes(self._folder / f"{name}.json"))

    def fetch(self, manifest: Manifest, to: Path) -> None:
        """See CacheStore."""
        with atomic.disk_full_as_error(to):
            shutil.copyfile(self._folder / manifest.archive, to)

    def publish(self, name: str, packed: Packed, manifest: Manifest) -> bool:
        """See CacheStore."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / manifest.archive
        staging = self._folder / f".{manifest.archive}.{threading.get_ident():x}.tmp"
        try:
            with atomic.disk_full_as_error(target):
                shutil.copyfile(packed.path, staging)
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
        try:
            atomic.write_new(self._folder / f"{name}.json", _bytes(manifest))
        except FileExistsError:
            standing = self.find(name)
            if standing is None or standing.archive != manifest.archive:
                target.unlink(missing_ok=True)
            return False
        return True


class BucketStore:
    """Archives in an object store; implements CacheStore."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def find(self, name: str) -> Manifest | None:
        """See CacheStore."""
        return _read(name, self._bucket.read(f"{name}.json"))

    def fetch(self, manifest: Manifest, to: Path) -> None:
        """See CacheStore."""
        if not self._bucket.fetch(manifest.archive, to):
            raise BadArchive(f"{manifest.archive} is gone, its manifest is not")

    def publish(self, name: str, packed: Packed, manifest: Manifest) -> bool:
        """See CacheStore."""
        self._bucket.send(manifest.archive, packed.path, sha256=packed.sha256)
        if self._bucket.create(f"{name}.json", _bytes(manifest)):
            return True
        standing = self.find(name)
        if standing is None or standing.archive != manifest.archive:
            self._bucket.delete([manifest.archive])
        return False


def open_store(place: Path | str) -> CacheStore:
    """The store at a folder, or at ``s3://bucket/prefix``."""
    if isinstance(place, str) and place.startswith(SCHEME):
        return BucketStore(Bucket.of(place))
    return FolderStore(Path(place))


def _bytes(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=1).encode() + b"\n"


def _read(name: str, data: bytes | None) -> Manifest | None:
    if data is None:
        return None
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise BadArchive(f"the manifest {name}.json cannot be read") from error
