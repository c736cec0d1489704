"""An object store in memory, which can be cut off or killed over at any of its calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.checkpoints.bucket import Bucket


class MemoryBucket(Bucket):
    """Keeps of the real one: objects are whole, and a name is created once.

    ``test_upload`` holds both to the same tests.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.before: Callable[[str, str], None] | None = None
        """Called with (call, name) before a call takes effect."""
        self.after: Callable[[str, str], None] | None = None
        """The same once it has, before it is answered."""

    def __str__(self) -> str:
        return "s3://memory/run"

    def create(self, name: str, data: bytes) -> bool:
        self._reach("create", name)
        is_new = name not in self.objects
        if is_new:
            self.objects[name] = (data, "")
        self._done("create", name)
        return is_new

    def read(self, name: str) -> bytes | None:
        self._reach("read", name)
        found = self.objects.get(name)
        return None if found is None else found[0]

    def send(self, name: str, path: Path, *, sha256: str) -> None:
        self._reach("send", name)
        self.objects[name] = (path.read_bytes(), sha256)
        self._done("send", name)

    def has(self, name: str, *, size: int, sha256: str) -> bool:
        self._reach("has", name)
        data, recorded = self.objects.get(name, (b"", None))
        return recorded == sha256 and len(data) == size

    def fetch(self, name: str, path: Path) -> bool:
        self._reach("fetch", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = self.objects.get(name)
        if found is None:
            return False
        path.write_bytes(found[0])
        return True

    def names(self, under: str) -> Iterator[str]:
        self._reach("names", under)
        yield from sorted(name for name in self.objects if name.startswith(under))

    def delete(self, names: list[str]) -> None:
        for name in names:
            self._reach("delete", name)
            self.objects.pop(name, None)
            self._done("delete", name)

    def _reach(self, call: str, name: str) -> None:
        if self.before is not None:
            self.before(call, name)

    def _done(self, call: str, name: str) -> None:
        if self.after is not None:
            self.after(call, name)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
