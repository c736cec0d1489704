"""A run directory as guard and session leave it, made without either; the ledger is a real one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from configs.load import LoadedRun, load_run
from configs.plan import make_plan
from runtime.checkpoints.files import segment_name
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import EngineDead
from runtime.evaluation.files import claim_try, finish_try, write_request
from runtime.evaluation.records import Request, Result
from runtime.launch.attempts import spec_digest
from runtime.launch.start import expected_counts
from runtime.policy import PolicyId
from runtime.publication.decision import Decision, VerifiedEngine, append_decision
from runtime.rundir import atomic, enter, history, workflow
from runtime.rundir.attempt import AttemptFile
from runtime.rundir.chain import Chain
from runtime.rundir.claims import claim_attempt, make_claim
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.rundir.workflow import Heartbeat

RUN_FILE = """\
name = "{name}"

[model]
recipe = "laptop"

[data]
recipe = "laptop"

[rollout]
groups_per_collection = 2

[reward]
verifier = "exact_match"

[core]
max_updates = 4

[checkpoint]
every_updates = 2

[evaluation]
every_updates = 2

[evaluation.sets.holdout]
recipe = "laptop"

[output]
root = "{root}"
"""
GROUPS = 2


class MadeRun:
    """Writes what guard and session would. Its guard is this very process."""

    def __init__(self, folder: Path, *, name: str = "made", root: str = "runs/made") -> None:
        self.file = folder / f"{name}.toml"
        self.file.write_text(RUN_FILE.format(name=name, root=root))
        self.loaded: LoadedRun = load_run(self.file)
        self.root = RunRoot.of(self.loaded.spec.output.root)
        self.chain = Chain(self.root)
        self.ledger = Ledger(PromptOrder(16, epochs=1, seed=1))
        self.epoch = 0

    def claim(self, attempt: int) -> None:
        """What a launcher writes before it starts the guard."""
        self.root.create()
        plan, text = make_plan(self.loaded), self.loaded.spec.model_dump_json()
        at = self.root.attempt(attempt)
        claim_attempt(
            at,
            make_claim(
                launcher="local",
                spec_digest=spec_digest(text),
                training_digest=plan.training_digest,
                time=0.0,
            ),
        )
        asked = AttemptFile(
            run=self.loaded.spec.name,
            training_digest=plan.training_digest,
            lease_s=30.0,
            expected=expected_counts(self.loaded.spec, plan),
        )
        atomic.write_bytes(at.attempt, asked.encode())
        for path in (at.run, self.root.run):
            path.write_text(text)
        for path in (at.plan, self.root.plan):
            path.write_text(plan.model_dump_json())

    def begin(
        self, *, here: HostBoot | None = None, restored: CommitRecord | None = None, **changes
    ) -> None:
        """The next attempt's guard owns the run."""
        self.epoch += 1
        self.claim(self.epoch)
        where = here or HostBoot.here()
        record = EpochRecord(
            epoch=self.epoch,
            time=time.time(),
            attempt=self.epoch,
            host=where.host,
            pid=os.getpid(),
            boot_id=where.boot_id,
            started=enter.started(os.getpid()) or 0.0,
            reason="test",
            restored=restored.policy if restored else None,
            restored_seq=restored.seq if restored else None,
            lease_s=None if self.chain.seen else 30.0,
        )
        self.chain.append(record.model_copy(update=changes))
        self.root.lease.touch()

    def train(self, update: int) -> None:
        """One collection: admitted, judged, consumed, kept, published."""
        groups = [self.ledger.admit() for _ in range(GROUPS)]
        keys = [(group.prompt_id, group.attempt) for group in groups]
        for key in keys:
            self.ledger.finish(*key)
        self.ledger.consume(keys, update)
        self.root.rollouts.mkdir(exist_ok=True)
        stem = self.root.collection_stem(update, self.epoch)
        stem.with_name(stem.name + ".parquet").write_bytes(b"PAR1 collection PAR1")
        self.publish(update)

    def publish(self, update: int) -> None:
        """The policy of an update is verified on one engine."""
        engine = VerifiedEngine(
            slot=0, incarnation="i", pause="retract", flushed=True, transfer_s=0
        )
        append_decision(
            self.root.path / "publications.jsonl",
            Decision(
                kind="publication",
                epoch=self.epoch,
                policy=str(PolicyId(self.epoch, update)),
                previous=None,
                mode="refresh",
                transport="disk",
                outcome="published",
                verified=(engine,),
                started_at=0.0,
            ),
        )

    def commit(self, update: int) -> CommitRecord:
        """Ledger segment, then the record that names it."""
        segment = self.ledger.snapshot()
        path = self.root.path / segment_name(update, self.epoch)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(segment.to_bytes())
        parent = history.newest_commit(self.chain.seen)
        record = self.chain.append(
            CommitRecord(
                epoch=self.epoch,
                time=time.time(),
                format_version=1,
                update=update,
                policy=str(PolicyId(self.epoch, update)),
                training_digest="t",
                layout={},
                data_fingerprint="d",
                ledger_checksum=segment.checksum(),
                consumed_digest=segment.digest,
                folder=f"checkpoints/{update:06d}-e{self.epoch}",
                files=(),
                parent_seq=parent.seq if parent else None,
            )
        )
        self.ledger.committed(segment)
        return record

    def evaluate(self, update: int, *, state: str = "succeeded") -> None:
        """A result of the held-out set at an update of this epoch."""
        folder = self.root.evaluation(str(PolicyId(self.epoch, update)), "holdout")
        request = Request(
            time=0.0,
            run="made",
            policy=str(PolicyId(self.epoch, update)),
            set="holdout",
            kind="final",
            required=True,
            mode="shared",
            attempt=self.epoch,
            epoch=self.epoch,
            set_digest="d",
            sampling={},
            seed=0,
        )
        write_request(folder, request)
        number, _ = claim_try(folder, by="session", time=0.0)
        reason = {"reason": "crashed"} if state == "skipped" else {}
        finish_try(folder, number, Result(time=1.0, state=state, metrics={"mean": 0.5}, **reason))

    def keep_books(self) -> None:
        """Audit files other than rollouts."""
        for path in (
            self.root.prepared / "receipt.json",
            self.root.contracts / "optimizer.jsonl",
            self.root.driver_timing,
            self.root.wandb / "run.json",
        ):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"time": 0.0}) + "\n")

    def end(self, state: str, update: int, *, activity: str | None = None, **more) -> None:
        """The guard's last record."""
        self.chain.append(
            EndRecord(
                epoch=self.epoch,
                time=time.time(),
                state=state,
                activity=activity,
                ended_by=more.get("ended_by", "max_updates"),
                update=update,
                failure=more.get("failure"),
            )
        )

    def view(self, *, beat_at: float | None = None, count: int = 1, **fields) -> None:
        """The session's view; its heartbeat is ``beat_at``, by default now."""
        now = time.time()
        rebuilt = workflow.rebuild(self.root, self.chain.seen, now=now)
        host = HostBoot.here().host
        at = now if beat_at is None else beat_at
        beat = Heartbeat(count=count, time=at, every_s=2.0, host=host, pid=1)
        changed = {"state": "training", "activity": "running", "heartbeat": beat, **fields}
        workflow.write(self.root, rebuilt.model_copy(update=changed))

    def run_to(self, last: int, *, state: str = "complete", **more) -> None:
        """A whole attempt: every commit, every evaluation, every file, and its end."""
        self.begin()
        self.commit(0)
        for update in range(1, last + 1):
            self.train(update)
            if update % 2 == 0 or update == last:
                self.commit(update)
                self.evaluate(update)
        self.keep_books()
        self.end(state, last, **more)
        workflow.write(self.root, workflow.rebuild(self.root, self.chain.seen, now=time.time()))


def dead(message: str = "engine 2 died", step: str = "segment/3") -> Failure:
    """A failure."""
    return Failure.of(EngineDead(message), step=step, time=0.0)
