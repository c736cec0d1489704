"""Evaluations that a person asks for: any set, at any update that is still there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.run import RunSpec
from runtime.checkpoints.export import read_receipt
from runtime.clock import Clock
from runtime.data.frozen import open_frozen
from runtime.errors import ConfigError
from runtime.evaluation.files import ask_once
from runtime.evaluation.found import at_update
from runtime.evaluation.opening import Asker, frozen_set
from runtime.evaluation.reading import receipts_of, standing_result
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record


def ask_by_hand(
    root: RunRoot, spec: RunSpec, *, update: int | None, names: Sequence[str], clock: Clock
) -> list[Path]:
    """Write what is not asked for yet; submitting it is another matter. Idempotent.

    A result that stands, or a request of whoever was first, is what is asked for then.

    Args:
        root: the run; it may be going on.
        spec: its run file.
        update: None: of the newest commit.
        names: of sets; none: all of the run file's.
        clock: of this process.

    Returns:
        The folder of each evaluation, in the order of the run file.

    Raises:
        ConfigError: if a set is not in the run file, nothing is left of that update, or the session
            is about to evaluate there itself.
        PartialWrite: if what was prepared is damaged.
    """
    if unknown := [name for name in names if name not in spec.evaluation.sets]:
        known = ", ".join(spec.evaluation.sets) or "none"
        raise ConfigError(f"no evaluation set is called {unknown[0]!r}; there are: {known}")
    records = Chain(root).read()
    at = history.committed_update(records) if update is None else update
    asked = [name for name in spec.evaluation.sets if not names or name in names]
    if not asked:
        raise ConfigError("the run file has no evaluation set: [evaluation.sets.NAME]")
    return [_asked_at(root, spec, records, at, name, clock) for name in asked]


def _asked_at(
    root: RunRoot,
    spec: RunSpec,
    records: tuple[Record, ...],
    update: int,
    name: str,
    clock: Clock,
) -> Path:
    if (found := standing_result(root, records, update=update, set_name=name)) is not None:
        return found[0]
    for folder, receipt in receipts_of(root, records, at_update(update)):
        if folder.name == name and receipt.stands:
            return folder
    policy = _policy_at(root, records, update)
    is_live = history.current_end(records) is None
    is_newest = update >= history.committed_update(records)
    if spec.evaluation.mode == "shared" and is_live and is_newest:
        # Its engines may be on the way there: two writers of one log of items.
        raise ConfigError(
            f"update {update} is where training stands, and it evaluates on its own engines: wait "
            "for the next commit, or for the end of the run"
        )
    return _request(root, spec, records, policy, name, clock)


def _request(
    root: RunRoot,
    spec: RunSpec,
    records: tuple[Record, ...],
    policy: PolicyId,
    name: str,
    clock: Clock,
) -> Path:
    # Not at the top: the session's rooms import this one.
    from runtime.session.preparing import Prepared

    prepared = Prepared.read(root)
    epoch = history.newest_epoch(records)
    if prepared is None or name not in prepared.sets or epoch is None:
        raise ConfigError(f"{root.prepared} does not hold the set {name}: the run never had it")
    found = prepared.sets[name]
    store = open_frozen(Path(found.data))
    frozen = frozen_set(spec, name, store=store, fingerprint=found.fingerprint)
    asker = Asker(run=spec.name, attempt=epoch.attempt, epoch=epoch.epoch, clock=clock)
    folder = root.evaluation(str(policy), name)
    # Without a snapshot: an export of that policy is looked for, else made from its commit.
    ask_once(folder, asker.request(frozen, policy, "cadence", mode="background"))
    return folder


def _policy_at(root: RunRoot, records: tuple[Record, ...], update: int) -> PolicyId:
    """The policy of history at an update whose weights are still there.

    Raises:
        ConfigError: if none are; names the updates of which there are some.
    """
    left = sorted(set(_policies(root, records)))
    for policy in reversed(left):
        if policy.update == update:
            return policy
    there = ", ".join(str(u) for u in sorted({policy.update for policy in left})) or "none"
    raise ConfigError(
        f"neither a commit nor an export of update {update} is left in {root.path}; there are: "
        f"{there}"
    )


def _policies(root: RunRoot, records: tuple[Record, ...]) -> Iterator[PolicyId]:
    for commit in history.standing_commits(records):
        if (root.path / commit.folder).is_dir():
            yield PolicyId.parse(commit.policy)
    for folder in (*root.path.glob("export*"), *root.snapshots.glob("e*.u*")):
        receipt = read_receipt(folder)
        if receipt is None or not receipt.is_model:
            continue
        policy = PolicyId.parse(receipt.policy)
        if history.is_standing(records, policy):
            yield policy
