"""The trainer's half of the broadcast transport; one object in each trainer rank's process.

All methods block and are called on every rank in the same order; only ``abort`` may be called
while another runs, from another thread. Rank 0 sends, the others take part in the export.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import torch

from runtime.engines.collective import CollectiveGroup
from runtime.engines.held_port import HeldPort
from runtime.engines.protocol import TensorSpec, WeightHash
from runtime.errors import ContractViolation
from runtime.publication.digests import Digests
from runtime.publication.groups import GroupPlan
from runtime.publication.limits import BUCKET_BYTES
from runtime.publication.protocol import ONLY_SHA256
from runtime.publication.safetensors_file import spec_bytes, spec_of
from runtime.publication.snapshot import WeightExport
from runtime.publication.told import Description

KEEP_BYTES = 8 * 1024**3
"""On GPUs: the whole weights a sending rank may hold beside its shard."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One bucket as one run of bytes."""

    flat: torch.Tensor
    shapes: tuple[tuple[torch.dtype, torch.Size], ...]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Packed:
        """Copy them, one after the other without gaps."""
        parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        return cls(torch.cat(parts), tuple((t.dtype, t.shape) for t in tensors))

    def tensors(self) -> list[torch.Tensor]:
        """As they were; in the same memory, but for those that lie askew in it."""
        found: list[torch.Tensor] = []
        at = 0
        for dtype, shape in self.shapes:
            end = at + dtype.itemsize * shape.numel()
            part = self.flat[at:end]
            # Without gaps a tensor may begin where its dtype cannot.
            part = part.clone() if at % dtype.itemsize else part
            found.append(part.view(dtype).view(shape))
            at = end
        return found


@dataclass(frozen=True, slots=True)
class Loose:
    """One bucket as it was exported: packed when it is sent."""

    parts: tuple[torch.Tensor, ...]

    @property
    def flat(self) -> torch.Tensor:
        """A copy, as ``Packed`` has it."""
        return Packed.of(list(self.parts)).flat

    def tensors(self) -> list[torch.Tensor]:
        """As they are."""
        return [tensor.detach().contiguous() for tensor in self.parts]


def _kept(tensors: list[torch.Tensor]) -> Packed | Loose:
    """Packed, if there is memory for a copy."""
    try:
        return Packed.of(tensors)
    except torch.OutOfMemoryError:
        return Loose(tuple(tensors))


class BroadcastSender:
    """Sends the exported weights bucket by bucket.

    Args:
        backend: this rank's trainer.
        rank: of the trainer; 0 sends.
        bucket_bytes: size of a bucket at most; a larger tensor goes alone.
        keep_bytes: weights up to this size are gathered and packed once, before engines pause, and
            kept for the sending until ``forget``; larger ones are gathered a second time then.
            None: ``KEEP_BYTES`` on GPUs, where gathering takes far longer than sending, and nothing
            on a CPU. Equal on all ranks.
    """

    def __init__(
        self,
        backend: WeightExport,
        *,
        rank: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        keep_bytes: int | None = None,
    ) -> None:
        if keep_bytes is None:
            keep_bytes = KEEP_BYTES if torch.cuda.is_available() else 0
        self._keep_bytes = keep_bytes
        self._kept: list[Packed | Loose] | None = None
        """Buckets of the last description, empty on ranks that do not send; None: not kept."""
        self._backend = backend
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._group: CollectiveGroup | None = None
        self._port: HeldPort | None = None
        self._lock = threading.Lock()
        self._sending: Future[None] | None = None
        self._next = 0
        self._export: Iterator[list[tuple[str, torch.Tensor]]] | None = None

    def describe(self, kinds: Iterable[WeightHash] = ONLY_SHA256) -> Description:
        """Walk through the export once for specs and digests; nothing is sent.

        What it saw is what ``send_bucket`` sends: the weights stand still in between.
        """
        self._kept = None  # first: what is packed now takes its memory
        total = sum(spec_bytes(spec) for spec in self._backend.weight_specs())
        buckets: list[tuple[TensorSpec, ...]] = []
        kept: list[Packed | Loose] = []
        keeps = total <= self._keep_bytes
        with Digests(kinds, total, self._bucket_bytes) as sums:
            for bucket in self._backend.export_weights(self._bucket_bytes):
                buckets.append(tuple(spec_of(name, tensor) for name, tensor in bucket))
                if keeps and self._rank == 0:
                    kept.append(_kept([tensor for _, tensor in bucket]))
                for name, tensor in bucket:
                    sums.add(name, tensor.detach().contiguous())
            digests = sums.result()
        self._kept = kept if keeps else None
        return Description(digests=digests, buckets=tuple(buckets), num_bytes=sums.num_bytes)

    def forget(self) -> None:
        """Let go of what was kept: the weights change, and what changes them needs the memory."""
        self._kept = None

    def free_port(self, host: str) -> int:
        """A port for the store of the next group; nobody else gets it until ``open_group`` is over.

        Args:
            host: where the others will look for the store; all addresses of it are held.
        """
        self._let_go(self._port)
        self._port = HeldPort()
        return self._port.port

    def open_group(self, plan: GroupPlan, timeout_s: float) -> None:
        """Make the group; returns when all ranks have joined.

        Raises:
            RuntimeError: if not all join within ``timeout_s``.
        """
        self.abort()
        if self._rank != 0:
            return
        # A late call, whose caller gave it up, must leave the next group's port alone.
        held = self._port if self._port and self._port.port == plan.port else None
        try:
            group = CollectiveGroup(
                host=plan.host,
                port=plan.port,
                rank=0,
                world_size=plan.world_size,
                name=plan.name,
                backend=plan.backend,
                timeout_s=timeout_s,
            )
        finally:
            self._let_go(held)
        with self._lock:
            self._group = group

    def send_bucket(self, index: int, flat: bool = False, count: int = 1) -> None:
        """Broadcast some buckets; 0 begins a new walk through the export.

        Args:
            index: the first one.
            flat: each as one run of bytes, tensor after tensor without gaps.
            count: how many: what was kept is sent without a wait between them.

        Raises:
            ContractViolation: if it is not the next one.
            RuntimeError: if a peer is gone, ``abort`` was called (before, too), or the group's
                timeout passed.
        """
        # As text: whoever called keeps it, and it must not keep the group alive with it, since
        # peers learn of an abort only when the group is gone.
        error: str | None = None
        # Kept ones at once; others one by one, so that no more than one is held.
        is_packed = self._kept is not None and all(isinstance(k, Packed) for k in self._kept)
        step = count if is_packed else 1
        for at in range(index, index + count, step):
            # Taken whatever went wrong: the other ranks are in this export, and would wait for us.
            try:
                taken = [self._take(i) for i in range(at, at + step)]
            except Exception as exc:
                if error is None:
                    raise
                raise RuntimeError(error) from exc
            if self._rank == 0 and error is None:
                try:
                    self._start(taken, flat).result()
                except RuntimeError as exc:  # out of memory, too
                    error = str(exc)
            del taken  # before the next one is gathered
        if error is not None:
            raise RuntimeError(error)

    def abort(self) -> None:
        """Leave the group; a broadcast under way fails here at once. Idempotent.

        Peers learn of it when the group's sockets close: at once too, or at the group's timeout if
        gloo was inside an operation, which nothing can interrupt.
        """
        with self._lock:
            group, self._group = self._group, None
            sending, self._sending = self._sending, None
        if sending is not None:
            _settle(sending, RuntimeError("the broadcast was aborted"))
        if group is not None:
            group.close()

    def _let_go(self, held: HeldPort | None) -> None:
        if held is None:
            return
        with self._lock:
            if self._port is held:
                self._port = None
        held.close()

    def _start(self, taken: list[Packed | Loose], flat: bool) -> Future[None]:
        """Begin to send these."""
        with self._lock:
            group = self._group
        if group is None:
            raise RuntimeError("there is no group: it was left before this bucket")
        tensors = [t for each in taken for t in ([each.flat] if flat else each.tensors())]
        sending: Future[None] = Future()
        with self._lock:
            self._sending = sending
        # A thread that can be left behind: gloo ends an operation at its timeout and not before.
        threading.Thread(
            target=_send, args=(group, tensors, sending), name="broadcast", daemon=True
        ).start()
        return sending

    def _take(self, index: int) -> Packed | Loose:
        """The next bucket; an empty one on ranks that do not send."""
        if index == 0:
            self._next = 0
            self._export = (
                self._backend.export_weights(self._bucket_bytes) if self._kept is None else iter(())
            )
        if self._export is None or index != self._next:
            raise ContractViolation(f"bucket {index} out of turn: next is {self._next}")
        self._next += 1
        if self._kept is not None:
            if self._rank == 0 and index >= len(self._kept):
                raise ContractViolation(f"there is no bucket {index}")
            return self._kept[index] if self._rank == 0 else Loose(())
        bucket = next(self._export, None)
        if bucket is None:
            raise ContractViolation(f"the export ended before bucket {index}")
        return Loose(tuple(t for _, t in bucket) if self._rank == 0 else ())


def _send(group: CollectiveGroup, tensors: list[torch.Tensor], sending: Future[None]) -> None:
    try:
        group.broadcast(tensors)
    except Exception as exc:  # handed over as text: its traceback holds the group
        _settle(sending, RuntimeError(f"{type(exc).__name__}: {exc}"))
    else:
        _settle(sending, None)


def _settle(sending: Future[None], error: Exception | None) -> None:
    """Set the outcome unless it is set."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            sending.set_result(None)
        else:
            sending.set_exception(error)
