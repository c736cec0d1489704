"""What runs in the process of one trainer rank: a backend, and answers that can be asked for twice.

No Ray here. A call whose answer got lost on the way (``ActorUnavailableError``) is asked again with
the same operation: done already, it is answered from memory; never done, it is done now.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.engines.protocol import WeightHash
from runtime.errors import FencedError, PublicationFailed
from runtime.publication.diagnostics import stacks_of_this_rank
from runtime.publication.protocol import ONLY_SHA256
from runtime.publication.sender import BroadcastSender
from runtime.publication.sharing import WeightSharing
from runtime.publication.snapshot import (
    WeightExport,
    digest_export,
    join_export,
    write_snapshot,
)
from runtime.publication.told import Digest, SharedWeights, WrittenSnapshot
from runtime.trainer.operations import Operation, RankInfo
from runtime.trainer.settings import TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.ranks import Ranks

T = TypeVar("T")
_CHANGING = frozenset({"load", "train_step", "restore"})
_SENDING = frozenset({"describe", "open_group", "send_bucket"})
_PUBLISHING = _SENDING | {"write_snapshot", "share_weights", "write_adapter", "digest_base"}


class RankServer:
    """One rank. Lanes: calls that change or read weights run one at a time; writing runs beside."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        rank: int,
        size: int,
        epoch: int,
        on_start: Callable[[], object] | None = None,
    ) -> None:
        """Make the backend; no weights yet.

        Args:
            settings: of the trainer.
            rank: this one.
            size: ranks there are.
            epoch: ownership epoch; operations of another one are refused.
            on_start: run first, in this process: ties it to its guard.
        """
        if on_start is not None:
            on_start()
        self._epoch = epoch
        self._ranks = Ranks(rank, size)
        self.backend = TorchTrainer(settings, self._ranks)
        self._sender = BroadcastSender(self.backend, rank=rank)
        self._sharing = WeightSharing(self.backend, rank=rank)
        self._steps = _Lane()
        self._writes = _Lane()
        self._stopped = threading.Event()

    def info(self) -> RankInfo:
        """Where this rank runs."""
        return RankInfo(rank=self._ranks.rank, host=socket.gethostname(), pid=os.getpid())

    def listen(self, host: str, timeout_s: float) -> int:
        """Open the rendezvous on rank 0; its port."""
        return self._ranks.listen(host, timeout_s=timeout_s)

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Enter the process group."""
        device = self._ranks.device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._ranks.join(host, port, backend=backend, timeout_s=timeout_s)

    def step(self, operation: Operation, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the backend that needs the weights to stand still.

        Raises:
            FencedError: if the operation is of another epoch, or older than the last one.
        """
        # A pool thread starts with OpenMP's own idea of how many threads there are.
        torch.set_num_threads(self.backend.settings.threads)
        self._ranks.enter_device()  # a thread begins with the first GPU
        return self._once(self._steps, operation, lambda: self._call(method, *args, **kwargs))

    def write_staged(self, operation: Operation, token: str, folder: str) -> dict[str, str]:
        """Write a staged copy, beside whatever ``step`` does."""
        return self._once(self._writes, operation, lambda: self.backend.write_staged(token, folder))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in _CHANGING:
            self._sender.forget()
        if method not in _PUBLISHING:
            return getattr(self.backend, method)(*args, **kwargs)
        with stacks_of_this_rank(self._ranks.rank, self._ranks.device, method):
            if method == "write_snapshot":
                return self._write_snapshot(self.backend, *args)
            if method in ("share_weights", "write_adapter", "digest_base"):
                return getattr(self, f"_{method}")(*args)
            return self._send(method, *args)

    def _send(self, method: str, *args: Any) -> Any:
        """A call of the broadcast sender; a broken collective is the publication's, not the rank's.

        Raises:
            PublicationFailed: if the group could not be made, or a peer left it.
        """
        try:
            return getattr(self._sender, method)(*args)
        except (RuntimeError, OSError) as exc:
            raise PublicationFailed(f"trainer rank {self._ranks.rank}, {method}: {exc}") from exc

    def free_port(self, host: str) -> int:
        """A free port where this rank runs."""
        return self._sender.free_port(host)

    def abort_broadcast(self) -> None:
        """Leave the broadcast group, also while a bucket is being sent."""
        self._sender.abort()

    def _share_weights(
        self, place: int, folder: str, kinds: frozenset[WeightHash]
    ) -> SharedWeights | None:
        return self._sharing.share(place, folder, kinds)

    def _write_snapshot(
        self, weights: WeightExport, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot | None:
        """Rank 0 writes the weights, the others take part; None from those."""
        if self._ranks.rank:
            join_export(weights)
            return None
        Path(folder).mkdir(parents=True, exist_ok=True)
        return write_snapshot(weights, folder, kinds)

    def _write_adapter(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> WrittenSnapshot | None:
        """The same of the adapters alone, as a folder that peft reads."""
        adapter = self.backend.adapter
        written = self._write_snapshot(adapter, folder, kinds)
        if written is not None:
            adapter.finish(Path(folder))
        return written

    def _digest_base(self, kinds: frozenset[WeightHash]) -> dict[WeightHash, Digest] | None:
        """Rank 0's digests of what lies under the adapters; None from the others."""
        base = self.backend.base
        if self._ranks.rank:
            join_export(base)
            return None
        return digest_export(base, kinds)

    def _once(self, lane: _Lane, operation: Operation, do: Callable[[], T]) -> T:
        if operation.epoch != self._epoch:
            raise FencedError(
                f"{operation.name} of epoch {operation.epoch} reached a trainer of {self._epoch}"
            )
        return lane.once(operation, do)

    def stay(self) -> None:
        """Return when ``stop`` was called; whoever waits here learns at once if the rank dies."""
        self._stopped.wait()

    def stop(self) -> None:
        """Leave the group and free memory. Idempotent."""
        self.backend.stop()
        self._stopped.set()


class _Lane:
    """Serial execution with a memory of the last outcome."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Operation | None = None
        self._value: Any = None
        self._error: Exception | None = None

    def once(self, operation: Operation, do: Callable[[], T]) -> T:
        with self._lock:
            if operation != self._last:
                if self._last is not None and operation.serial <= self._last.serial:
                    raise FencedError(
                        f"{operation.name} ({operation.serial}) came after "
                        f"{self._last.name} ({self._last.serial})"
                    )
                self._last, self._value, self._error = operation, None, None
                try:
                    self._value = do()
                except Exception as exc:
                    # Kept, so that a repeated call fails the same way and is not tried again.
                    self._error = exc
            if self._error is not None:
                raise self._error
            return self._value
