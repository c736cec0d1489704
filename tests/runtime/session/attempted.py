"""An attempt's files as its guard leaves them for the session, without a guard."""

from pathlib import Path

from configs.load import load_run
from configs.plan import make_plan
from runtime.clock import Clock
from runtime.launch.freezing import expected_counts
from runtime.rundir import atomic
from runtime.rundir.attempt import AttemptFile, GuardFile
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, EpochRecord
from runtime.session.context import Context

RUN_FILE = """
name = "attempted"
[model]
path = "{folder}"
[data]
train = "{folder}/train.jsonl"
[reward]
verifier = "exact_match"
[rollout]
groups_per_collection = 2
samples_per_prompt = 2
[core]
max_updates = 8
[checkpoint]
every_updates = 2
[evaluation.sets.held]
prompts = "{folder}/held.jsonl"
[session]
retries = 1
retry_backoff = "0s"
[output]
root = "{folder}/run"
"""


def context_of(folder: Path, *sets: str, clock: Clock | None = None) -> Context:
    """The session's context in epoch 1 of attempt 1; its epoch record is in the chain."""
    folder.mkdir(exist_ok=True)
    file = folder / "run.toml"
    file.write_text(RUN_FILE.format(folder=folder))
    loaded = load_run(file, sets)
    plan = make_plan(loaded)
    root = RunRoot(folder / "run")
    root.create()
    attempt = root.attempt(1)
    attempt.path.mkdir(exist_ok=True)
    guard = GuardFile(
        epoch=1, host="h", boot_id="b", pid=1, started=0.0, fifo="", lease=str(root.lease),
        lease_s=30.0, lease_device=0, lease_inode=0,
    )  # fmt: skip
    asked = AttemptFile(
        run=loaded.spec.name,
        training_digest=plan.training_digest,
        lease_s=30.0,
        expected=expected_counts(loaded.spec, plan),
    )
    atomic.write_bytes(attempt.run, loaded.spec.model_dump_json().encode())
    atomic.write_bytes(attempt.plan, plan.model_dump_json().encode())
    atomic.write_bytes(attempt.attempt, asked.encode())
    atomic.write_bytes(attempt.guard, guard.encode())
    own(root, epoch=1)
    return Context.open(attempt.path, clock=clock)


def own(root: RunRoot, *, epoch: int) -> None:
    """Append an epoch record."""
    chain = Chain(root)
    chain.read()
    chain.append(
        EpochRecord(
            epoch=epoch, time=0.0, attempt=1, host="h", pid=1, boot_id="b", started=0.0,
            reason="test", lease_s=30.0 if epoch == 1 else None,
        )
    )  # fmt: skip


def commit(path: Path, *, update: int) -> None:
    """Append a commit record of epoch 1, without files."""
    chain = Chain(RunRoot(path))
    chain.read()
    chain.append(
        CommitRecord(
            epoch=1, time=0.0, format_version=1, update=update, policy=f"e1.u{update}",
            training_digest="t", layout={}, data_fingerprint="d", ledger_checksum="l",
            consumed_digest="c", folder=f"checkpoints/{update:06d}-e1", files=(),
        )
    )  # fmt: skip
