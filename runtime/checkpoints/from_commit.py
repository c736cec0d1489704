"""An export of any commit that is still there, through a trainer of one rank in this process."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from configs.run import RunSpec
from runtime.checkpoints.export import (
    ExportReceipt,
    export_commit,
    export_damage,
    read_receipt,
)
from runtime.checkpoints.resume import restorable_at
from runtime.errors import ConfigError
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.trainer.local import LocalGroup
from runtime.trainer.settings import from_spec


def trainer_of(spec: RunSpec) -> LocalGroup:
    """A trainer of one rank; it reads the states of any number of ranks. Loads torch."""
    # Without its teacher: nothing is trained here.
    settings = from_spec(
        spec.core, spec.rollout, dtype=spec.model.dtype, seed=spec.seed, lora=spec.lora
    )
    return LocalGroup(settings)


async def export_update(root: RunRoot, spec: RunSpec, *, model: Path, update: int) -> ExportReceipt:
    """Make ``export-<update>/`` from the commit of that update. Idempotent.

    An export that stands and is whole is kept; it needs neither the run nor its processes.

    Args:
        root: the run.
        spec: its run file.
        model: folder of the initial model, for config and tokenizer.
        update: of a commit.

    Raises:
        ConfigError: if there is no such commit any more; says which there are.
        PartialWrite: if its files are damaged.
        DiskFull: if there is no room; nothing is left behind then.
    """
    records = Chain(root).read()
    folder = root.export_at(update)
    standing = read_receipt(folder)
    is_standing = standing is not None and history.is_standing(
        records, PolicyId.parse(standing.policy)
    )
    if standing is not None and is_standing:
        damage = await anyio.to_thread.run_sync(export_damage, folder, standing)
        if not damage:
            return standing
    found = await anyio.to_thread.run_sync(restorable_at, root, records, update)
    if found is None:
        left = [
            str(commit.update)
            for commit in history.standing_commits(records)
            if (root.path / commit.folder).is_dir()
        ]
        raise ConfigError(
            f"no commit of update {update} is left in {root.checkpoints}; there are: "
            f"{', '.join(left) or 'none'}"
        )
    trainer = trainer_of(spec)
    try:
        return await export_commit(
            root,
            trainer,
            found,
            model=model,
            epoch=PolicyId.parse(found.commit.policy).epoch,
            adapter=spec.lora.rank > 0 and spec.lora.export == "adapter",
        )
    finally:
        with anyio.CancelScope(shield=True):
            await trainer.shutdown()
