"""The adapter transport: the trainer's adapters travel as a folder, their base stays where it is.

An engine starts with the base; every publication brings a whole adapter, so a restarted engine
needs the kept snapshot and nothing else. The base is verified with it, each time: digests of the
trainer's base are made once, for it never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from runtime.engines.protocol import WeightHash
from runtime.policy import PolicyId
from runtime.publication.diagnostics import Diagnostics
from runtime.publication.disk import DiskTransport, Written
from runtime.publication.protocol import ONLY_SHA256, Snapshot, Target


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


class _Adapters:
    """Implements ``disk.WeightSource``: a folder of adapters in place of one of weights."""

    def __init__(self, trainer: AdapterTrainer) -> None:
        self._trainer = trainer

    async def write_snapshot(
        self, folder: str, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Written:
        return await self._trainer.write_adapter(folder, kinds)


class AdapterTransport(DiskTransport):
    """Implements PublicationTransport with adapters in folders.

    Args:
        trainer: writes them; what lies under them stands still as long as this lives.
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
        super().__init__(_Adapters(trainer), root, diagnostics)
        self._trainer = trainer
        self._base: dict[WeightHash, Mapping[str, str]] = {}

    async def prepare(
        self, policy: PolicyId, kinds: frozenset[WeightHash] = ONLY_SHA256
    ) -> Snapshot:
        """Have the trainer write its adapters; the first call takes digests of the base too.

        The snapshot counts the tensors of both, which an engine is verified by, and the bytes of
        the adapters, which travel.

        Raises:
            ConfigError: if the trainer has no adapters.
        """
        unknown = kinds - self._base.keys()
        if unknown:
            self._base.update(await self._trainer.digest_base(unknown))
        snapshot = await super().prepare(policy, kinds)
        digests = {kind: {**self._base[kind], **of_it} for kind, of_it in snapshot.digests.items()}
        num_tensors = max(len(both) for both in digests.values())
        return replace(snapshot, num_tensors=num_tensors, digests=digests)

    async def _order(self, target: Target, folder: str, policy: PolicyId, *, flush: bool) -> None:
        await target.client.update_adapter(folder, policy, flush=flush)
