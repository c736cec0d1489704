"""Host copies of a rank's state, made and written beside training.

``stage`` only begins the copy. Forward and backward passes read what is copied and go on; the next
step of the optimizer would change it and waits for ``settle``. On a GPU the copy runs on a stream
of its own, and it is the optimizer's stream that waits, not the host.

Writing streams the copy into its file while two threads follow: one syncs what was written, one
reads it back and hashes it. A commit so takes as long as the slowest of the three.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from runtime import faults
from runtime.publication.safetensors_file import SafetensorsFile, spec_of
from runtime.rundir.atomic import disk_full_as_error
from runtime.trainer.protocol import StagedState
from runtime.trainer.torch.record import RankRecord

_AT_ONCE_BYTES = 8 << 20
"""A smaller state is copied on the spot: a thread costs more."""
_SYNC_BYTES = 32 << 20
_READ_BYTES = 4 << 20
_PATIENCE_S = 0.002
"""How often a follower looks at a file that grows."""


@dataclass(slots=True)
class _Copy:
    buffers: dict[str, Tensor]
    """Host tensors by name; those that are parts of one on the device are parts of one here."""
    record: RankRecord | None = None
    is_whole: Future[torch.cuda.Event | None] = field(
        default_factory=Future[torch.cuda.Event | None]
    )
    """Done once the host need not hold anything back; the event says when the GPU is through."""


class Staging:
    """Host copies of a rank's tensors. Thread-safe: writing runs beside training.

    Buffers are kept and used again: memory that was never touched costs seven times a copy, and
    memory that a GPU copies to must be pinned, which takes seconds.
    """

    def __init__(self, *, at_once_bytes: int = _AT_ONCE_BYTES) -> None:
        self._at_once_bytes = at_once_bytes
        self._lock = threading.Lock()
        self._free: list[_Copy] = []
        self._held: dict[str, _Copy] = {}
        self._last: _Copy | None = None
        self._tokens = itertools.count(1)
        self._stream: torch.cuda.Stream | None = None

    def stage(self, tensors: Mapping[str, Tensor], record: RankRecord) -> StagedState:
        """Begin to copy every tensor to host memory, also on CPU.

        Until ``settle`` returned nobody may change them. The returned stall is what this call took;
        what ``settle`` takes later comes on top.
        """
        started = time.perf_counter()
        self.settle()
        with self._lock:
            copy = self._free.pop() if self._free else _Copy({})
        copy.record, copy.is_whole = record, Future()
        size = sum(tensor.nbytes for tensor in tensors.values())
        begin = self._begin(copy, tensors)
        # With its memory there a GPU's copy is only ordered, and by this thread: two that call into
        # Python at once hold one another up for longer than the copies take.
        is_ordered = bool(copy.buffers) and any(t.is_cuda for t in tensors.values())
        if is_ordered or size <= self._at_once_bytes:
            begin()
        else:
            threading.Thread(target=begin, name="staging", daemon=True).start()
        self._last = copy
        token = f"u{record.update}-{next(self._tokens)}"
        with self._lock:
            self._held[token] = copy
        return StagedState(token=token, bytes=size, stall_s=time.perf_counter() - started)

    def settle(self) -> None:
        """Return when what was staged last may be changed; on a GPU: by its current stream.

        Raises:
            RuntimeError: what the copy failed with, host memory that could not be had.
        """
        if self._last is None:
            return
        event = self._last.is_whole.result()
        if event is not None:
            event.wait()
        self._last = None

    def _begin(self, copy: _Copy, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """What makes the copy; on a GPU it begins after all that is queued now."""
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        ready = None
        if device is not None:
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))

        def run() -> None:
            try:
                # A thread begins with OpenMP's own idea of how many threads there are.
                torch.set_num_threads(1)
                if ready is None or self._stream is None:
                    _copy(copy.buffers, tensors)
                    copy.is_whole.set_result(None)
                    return
                with torch.cuda.stream(self._stream):
                    ready.wait()
                    _copy(copy.buffers, tensors)
                    done = torch.cuda.Event()
                    done.record()
                copy.is_whole.set_result(done)
            except BaseException as exc:  # whoever waits is told
                copy.is_whole.set_exception(exc)

        return run

    def write(self, token: str, folder: Path) -> dict[str, str]:
        """Write a copy as this rank's files, fsync them and the folder, free the copy.

        The copy is freed also when writing fails: a failed commit is made good by a new one.

        Returns:
            SHA-256 of each file by its name.

        Raises:
            KeyError: if ``token`` is unknown or was written before.
            DiskFull: if the disk is full.
        """
        with self._lock:
            copy = self._held.pop(token)
        record = copy.record
        if record is None:
            raise KeyError(token)
        stem = f"trainer-{record.rank:05d}-of-{record.world_size:05d}"
        try:
            event = copy.is_whole.result()
            if event is not None:
                event.synchronize()
            path, described = folder / f"{stem}.safetensors", folder / f"{stem}.json"
            text = record.model_dump_json().encode()
            with disk_full_as_error(path):
                digests = {path.name: write_tensors(path, copy.buffers)}
                if faults.plan is not None:
                    faults.plan.reach("commit.save", path)
                described.write_bytes(text)
                for name in (described, folder):
                    _fsync(name)
            return digests | {described.name: hashlib.sha256(text).hexdigest()}
        finally:
            copy.record = None
            with self._lock:
                self._free.append(copy)


def _copy(buffers: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy by name into ``buffers``; tensors that fill one memory together are one copy."""
    for name in buffers.keys() - tensors.keys():
        del buffers[name]
    for names in _by_memory(tensors):
        parts = {name: tensors[name] for name in names}
        if any(not _fits(buffers.get(name), tensor) for name, tensor in parts.items()):
            buffers.update(_host_like(parts))
        first = names[0]
        if len(names) == 1:
            buffers[first].copy_(tensors[first], non_blocking=True)
        else:
            _whole(buffers[first]).copy_(_whole(tensors[first]), non_blocking=True)


def _by_memory(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in groups: those that share a memory and fill nine tenths of it, others alone."""
    sharing: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        sharing.setdefault(key, []).append(name)
    groups: list[list[str]] = []
    for names in sharing.values():
        filled = sum(tensors[name].nbytes for name in names)
        if 10 * filled >= 9 * tensors[names[0]].untyped_storage().nbytes():
            groups.append(names)
        else:
            groups += [[name] for name in names]
    return groups


def _fits(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)


def _host_like(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host tensors as these, laid out alike; of several, in one piece."""
    some = next(iter(parts.values()))
    if len(parts) == 1:
        made = torch.empty(some.shape, dtype=some.dtype, pin_memory=some.is_cuda)
        return dict.fromkeys(parts, made)
    size = some.untyped_storage().nbytes() // some.itemsize
    whole = torch.empty(size, dtype=some.dtype, pin_memory=some.is_cuda)
    return {
        name: whole.as_strided(part.shape, part.stride(), part.storage_offset())
        for name, part in parts.items()
    }


def _whole(part: Tensor) -> Tensor:
    """All elements of the memory a tensor lies in."""
    size = part.untyped_storage().nbytes() // part.itemsize
    return part.as_strided((size,), (1,), 0)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, durable, and return its SHA-256.

    Raises:
        DiskFull: if there is no room.
    """
    # In the order of the file, so that it grows from its beginning and can be followed.
    named = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    path.unlink(missing_ok=True)  # an older one would be followed to its end
    grows = _Growing(path)
    with SafetensorsFile(path, [spec_of(name, tensor) for name, tensor in named]) as file:
        with grows:
            for name, tensor in named:
                file.add(name, tensor)
                if grows.error is not None:
                    break
        if grows.error is None:
            file.finish(durable=True)
    if grows.error is not None:
        raise grows.error
    return grows.digest


class _Growing:
    """Two threads behind a file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.error: OSError | None = None
        self.digest = ""

    def __enter__(self) -> None:
        for follow in (self._hash, self._sync):
            thread = threading.Thread(target=self._guarded, args=(follow,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, follow: Callable[[int], None]) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                follow(fd)
            finally:
                os.close(fd)
        except OSError as exc:
            self.error = exc

    def _hash(self, fd: int) -> None:
        sha, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        view = memoryview(buffer)
        while True:
            is_over = self._is_over.is_set()  # before reading: then what is read is all there is
            if count := os.readv(fd, [buffer]):
                sha.update(view[:count])
            elif is_over:
                break
            else:
                self._is_over.wait(_PATIENCE_S)
        self.digest = sha.hexdigest()

    def _sync(self, fd: int) -> None:
        synced = 0
        while not self._is_over.is_set():
            size = os.fstat(fd).st_size
            if size - synced >= _SYNC_BYTES:
                os.fdatasync(fd)
                synced = size
            else:
                self._is_over.wait(_PATIENCE_S)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
