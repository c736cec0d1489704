"""The adapter transport: the trainer's adapters travel as a folder, their base stays where it is.

An engine starts with the base; every publication brings a whole adapter, so a restarted engine
needs the kept snapshot and nothing else. The base is verified with it, each time: digests of the
trainer's base are made once, for it never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.engines.protocol import WeightHash
from runtime.policy import PolicyId
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.disk import DiskTransport, Written
from runtime.publication.protocol import ONLY_SHA256, Target


class AdapterTrainer(Protocol):
    """The trainer group, as this transport sees it."""

    async def write_adapter(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Written:
        """Write the adapters alone into ``folder``, in peft's format."""
        ...

    async def digest_base(
        self, kinds: frozenset[WeightHash]
    ) -> Mapping[WeightHash, Mapping[str, str]]:
        """Digests, by hash and HF name, of the weights under them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """An adapter that was written, and the base it belongs to. Implements ``Written``."""

    num_tensors: int
    """Of base and adapter: what an engine is verified by."""
    num_bytes: int
    """Of the adapter: what travels."""
    digests: Mapping[WeightHash, Mapping[str, str]]
    """The base by HF name, the adapter by peft's names."""

    @property
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 of both; KeyError where it was not asked for."""
        return self.digests["sha256"]


class AdapterSource:
    """Implements ``disk.WeightSource`` with the adapters of a trainer whose base stands still."""

    def __init__(self, trainer: AdapterTrainer) -> None:
        self._trainer = trainer
        self._base: dict[WeightHash, Mapping[str, str]] = {}

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> AdapterSnapshot:
        """Write the current adapters; the first call takes the base's digests too.

        Raises:
            ConfigError: if the trainer has no adapters.
        """
        unknown = kinds - self._base.keys()
        if unknown:
            self._base.update(await self._trainer.digest_base(unknown))
        written = await self._trainer.write_adapter(folder, kinds)
        digests: dict[WeightHash, Mapping[str, str]] = {
            kind: {**self._base[kind], **written.digests[kind]} for kind in kinds
        }
        return AdapterSnapshot(
            num_tensors=written.num_tensors + max(len(self._base[kind]) for kind in kinds),
            num_bytes=written.num_bytes,
            digests=digests,
        )


class AdapterTransport(DiskTransport):
    """Implements PublicationTransport with adapters in folders.

    Args:
        trainer: writes them.
        root: where scratch folders lie; None chooses memory. On several hosts a shared folder.
        diagnostics: told of each step.
    """

    name = "adapter"

    def __init__(
        self,
        trainer: AdapterTrainer,
        root: Path | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        super().__init__(AdapterSource(trainer), root, diagnostics)

    async def _order(self, target: Target, folder: str, policy: PolicyId, *, flush: bool) -> None:
        await target.client.update_adapter(folder, policy, flush=flush)
