"""Restoring caches before a start, and publishing them after an end. Neither can fail a run.

One folder per node and session holds every compiler's cache, a part each (``caches.parts``).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from runtime.caches.archive import BadArchive, pack, unpack
from runtime.caches.key import CacheKey
from runtime.caches.parts import PARTS
from runtime.caches.stores import CacheStore, Manifest
from runtime.clock import Clock

T = TypeVar("T")
Outcome = Literal["published", "present", "timed_out", "cancelled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What became of one part."""

    part: str
    outcome: Outcome
    pack_s: float = 0.0
    publish_s: float = 0.0
    num_bytes: int = 0
    num_files: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What was there before the start."""

    parts: Mapping[str, int]
    """Files by part that was restored; empty: every compiler starts cold."""
    problems: Mapping[str, str]
    """By part that was published and could not be used."""


def restore(root: Path, store: CacheStore, key: CacheKey, *, wait_s: float) -> Restored:
    """Bring published parts into ``root``; what does not come in time starts cold.

    Args:
        root: made if it does not exist; parts that are there are left as they are.
        store: where from.
        key: of this run on this machine.
        wait_s: the one wait that all parts share.
    """
    root.mkdir(parents=True, exist_ok=True)
    parts: dict[str, int] = {}
    problems: dict[str, str] = {}

    def fetch(part: str) -> int | None:
        manifest = store.find(_name(key, part))
        if manifest is None or (root / part).exists():
            return None
        archive = root / f".{part}.tar.zst"
        try:
            store.fetch(manifest, archive)
            if archive.stat().st_size != manifest.size:
                raise BadArchive(f"{manifest.archive}: not {manifest.size} bytes")
            return unpack(archive, root / part, sha256=manifest.sha256)
        finally:
            archive.unlink(missing_ok=True)

    for part, result in _at_once(fetch, list(PARTS), at_once=len(PARTS), wait_s=wait_s).items():
        if isinstance(result, Exception):
            problems[part] = f"{type(result).__name__}: {result}"
        elif result is not None:
            parts[part] = result
    return Restored(parts=parts, problems=problems)


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Publishes the parts of one root, a limited number at once, within one shared wait."""

    root: Path
    store: CacheStore
    key: CacheKey
    by: str
    """Run and attempt, for the manifest."""
    publishers: int
    """At once."""
    wait_s: float
    """The one wait all of them share."""
    clock: Clock
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set: parts that have not begun are not begun."""

    def publish(self) -> list[PartReport]:
        """Pack on local disk and publish; a report per part that has anything in it. Never raises.

        A thread that hangs in the store past the wait is left to the end of the process.
        """
        parts = [part for part in PARTS if _has_files(self.root / part)]
        results = _at_once(self._one, parts, at_once=self.publishers, wait_s=self.wait_s)
        return [self._report(part, results[part]) for part in parts]

    def _one(self, part: str) -> PartReport:
        if self.cancelled.is_set():
            return PartReport(part=part, outcome="cancelled")
        name = _name(self.key, part)
        if self.store.find(name) is not None:
            return PartReport(part=part, outcome="present")
        archive = self.root / f".{part}.packing"
        try:
            began = self.clock.monotonic()
            packed = pack(self.root / part, archive)
            pack_s = self.clock.monotonic() - began
            if self.cancelled.is_set():
                return PartReport(part=part, outcome="cancelled", pack_s=pack_s)
            manifest = Manifest(
                archive=f"{packed.sha256}.tar.zst",
                sha256=packed.sha256,
                size=packed.size,
                num_files=packed.num_files,
                by=self.by,
                time=self.clock.time(),
            )
            began = self.clock.monotonic()
            is_first = self.store.publish(name, packed, manifest)
            return PartReport(
                part=part,
                outcome="published" if is_first else "present",
                pack_s=pack_s,
                publish_s=self.clock.monotonic() - began,
                num_bytes=packed.size,
                num_files=packed.num_files,
            )
        finally:
            with suppress(OSError):
                archive.unlink(missing_ok=True)

    def _report(self, part: str, result: PartReport | Exception) -> PartReport:
        if isinstance(result, PartReport):
            return result
        if isinstance(result, TimeoutError):
            problem = f"not done within {self.wait_s:g} s"
            return PartReport(part=part, outcome="timed_out", problem=problem)
        problem = f"{type(result).__name__}: {result}"
        return PartReport(part=part, outcome="failed", problem=problem)


def discard(root: Path) -> None:
    """Remove a node's copy; what cannot be removed is left to the next session."""
    shutil.rmtree(root, ignore_errors=True)


def _name(key: CacheKey, part: str) -> str:
    return f"{key.digest}-{part}"


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_file() for path in folder.rglob("*"))


def _at_once(
    act: Callable[[str], T], parts: Sequence[str], *, at_once: int, wait_s: float
) -> dict[str, T | Exception]:
    """Results by part; TimeoutError where the shared wait was over first.

    Daemon threads, not a pool: an interpreter waits for its pools at exit, and a store that hangs
    must hold nobody up.
    """
    results: dict[str, Future[T]] = {part: Future() for part in parts}
    turns = threading.Semaphore(at_once)

    def run(part: str) -> None:
        with turns:
            try:
                results[part].set_result(act(part))
            except Exception as error:  # whatever a store or a compiler's folder comes up with
                results[part].set_exception(error)

    for part in parts:
        threading.Thread(target=run, args=(part,), name=f"cache {part}", daemon=True).start()
    until = time.monotonic() + wait_s
    found: dict[str, T | Exception] = {}
    for part, future in results.items():
        try:
            found[part] = future.result(max(0.0, until - time.monotonic()))
        except Exception as error:
            found[part] = error
    return found
