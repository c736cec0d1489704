"""Where a session goes on from: the commit that the epoch names, its ledger, its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import anyio.to_thread

from runtime.checkpoints.identity import RunIdentity, differences
from runtime.checkpoints.resume import Restorable, check_restored, find_restorable
from runtime.data.frozen import PromptStore
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import ConfigError, SessionLost
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.session.context import Context
from runtime.session.ground import Ground
from runtime.session.preparing import Prepared
from runtime.session.serving import (
    open_stores,
)
from runtime.telemetry.events import Event
from runtime.telemetry.timing import Stage
from runtime.trainer.group import TrainerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the prompts and the newest commit say; the trainer stands at the same update."""

    identity: RunIdentity
    stores: Mapping[str, PromptStore]
    """The frozen prompts: ``train`` under the empty name, evaluation sets under their own."""
    order: PromptOrder
    ledger: Ledger
    found: Restorable | None
    """None on a fresh start."""
    update: int


async def stand(ground: Ground, prepared: Prepared, trainer: TrainerGroup) -> Standing:
    """Restore trainer and ledger from the commit that this epoch names, if there is one.

    Raises:
        SessionLost: if the newest valid commit is another one.
        ConfigError: if what is trained has changed since.
    """
    context, recorder = ground.context, ground.recorder
    spec = context.spec
    identity = RunIdentity(
        training_digest=context.order.training_digest,
        layout={
            "trainer_ranks": context.plan.topology.trainer_ranks,
            "engines": spec.rollout.engines,
        },
        data_fingerprint=prepared.fingerprint,
    )
    stores = open_stores(prepared)
    order = PromptOrder(
        len(stores[""]), epochs=spec.data.epochs, seed=spec.seed, shuffle=spec.data.shuffle
    )
    found = await anyio.to_thread.run_sync(_find, context, identity)
    update = 0
    if found is not None:
        with recorder.timing.stage(Stage.RESTORE):
            update = await _restore(trainer, found)
        recorder.lifecycle.record(
            Event.CHECKPOINT_RESTORED, update=update, policy=found.commit.policy
        )
    ground.view.update = update
    return Standing(
        identity=identity,
        stores=stores,
        order=order,
        ledger=Ledger(order) if found is None else Ledger.restore(found.segments, order),
        found=found,
        update=update,
    )


def _find(context: Context, identity: RunIdentity) -> Restorable | None:
    """The commit to go on from; it must be the one the epoch record names."""
    records = Chain(context.root).check(context.epoch)
    epoch = history.newest_epoch(records)
    found = find_restorable(context.root, records)
    named = None if epoch is None else epoch.restored_seq
    if (None if found is None else found.commit.seq) != named:
        raise SessionLost(
            f"epoch {context.epoch} names record {named} as the commit it restores, but the newest "
            f"valid one is {None if found is None else found.commit.seq}: a new epoch names it"
        )
    if found is not None and (changed := differences(found.commit, identity)):
        raise ConfigError(
            f"this run cannot go on from {found.commit.folder}: {', '.join(changed)} changed. "
            "Put it back, or start another run",
            changed=list(changed),
        )
    return found


async def _restore(trainer: TrainerGroup, found: Restorable) -> int:
    if found.initial is not None:
        return 0  # commit 0 refers to the initial model, which is loaded already
    restored = await trainer.restore(str(found.folder))
    check_restored(restored, found.commit)
    return found.commit.update
