"""An object store in memory, which can be cut off or killed over at any of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from runtime.checkpoints.bucket import Bucket, StoreUnreachable
from runtime.rundir import atomic


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


class Crash(BaseException):
    """The process is gone; no handler of the code under test may run on after it."""


Kind = Literal["crash", "away", "lost"]
Fault = tuple[Kind, int] | None
"""What happens at which counted call.

``crash``: the process is gone before a call that changes store or disk; ``away``: a call is
refused; ``lost``: one that changes the store is made, and its answer does not come.
"""


class Cut:
    """One fault in the calls of a block."""

    def __init__(self, fault: Fault) -> None:
        self._kind, self._left = ("", -1) if fault is None else fault
        self.has_struck = False
        """Otherwise its number was beyond all calls."""

    def before(self, call: str, name: str) -> None:
        is_change = call in ("create", "send", "delete")
        if self._kind == "crash" and is_change and self._counted():
            raise Crash(f"{call} {name}")
        if self._kind == "away" and self._counted():
            raise StoreUnreachable(f"{call} {name}")

    def after(self, call: str, name: str) -> None:
        if self._kind == "lost" and self._counted():
            raise StoreUnreachable(f"{call} {name}: no answer")

    def probe(self, operation: str, path: Path) -> None:
        if self._kind == "crash" and self._counted():
            raise Crash(f"{operation} {path}")

    def _counted(self) -> bool:
        self._left -= 1
        self.has_struck = self.has_struck or self._left == -1
        return self._left == -1


@contextmanager
def cut(bucket: MemoryBucket, fault: Fault) -> Iterator[Cut]:
    """Let a fault strike in the block, in the store or, a crash, at the disk."""
    made = Cut(fault)
    bucket.before, bucket.after, atomic.probe = made.before, made.after, made.probe
    try:
        yield made
    finally:
        bucket.before = bucket.after = atomic.probe = None
