"""The HF export at a run's end: the trainer's present weights, verified, with a receipt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoints.export import export_live, read_receipt
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.session.context import Context
from runtime.session.preparing import Prepared
from runtime.telemetry.events import Event
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.trainer.handle import TrainerHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExporter:
    """Implements ``runtime.session.parts.Exporter``."""

    context: Context
    prepared: Prepared
    trainer: TrainerHandle
    lifecycle: LifecycleLog

    async def export(self, policy: PolicyId) -> None:
        """Write the final export of ``policy``; one of that update that stands is kept.

        Raises:
            DiskFull: if there is no room.
            PartialWrite: if it does not read back equal.
        """
        root, spec = self.context.root, self.context.spec
        standing = read_receipt(root.export)
        if standing is not None and standing.update == policy.update:
            records = Chain(root).check(self.context.epoch)
            if history.is_standing(records, PolicyId.parse(standing.policy)):
                return
        receipt = await export_live(
            root,
            self.trainer,
            policy,
            model=Path(self.prepared.model),
            epoch=self.context.epoch,
            final=True,
            adapter=spec.lora.rank > 0 and spec.lora.export == "adapter",
        )
        self.lifecycle.record(
            Event.EXPORT_FINISHED,
            update=policy.update,
            policy=str(policy),
            num_bytes=receipt.num_bytes,
        )
