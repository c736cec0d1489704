"""A run directory written the way guard and session do, without either."""

import json
import os
from pathlib import Path

from runtime.clock import ManualClock
from runtime.errors import SessionLost
from runtime.policy import PolicyId
from runtime.rundir import enter, workflow
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import HostBoot
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord
from runtime.rundir.workflow import Progress
from runtime.session.ensure import Onlooker
from runtime.session.steps import Step

ELSEWHERE = HostBoot("elsewhere", "boot")
LEASE_S = 30.0


class Run:
    """A run directory written the way guard and session do, without either."""

    def __init__(self, root: RunRoot) -> None:
        self.root = root
        self.chain = Chain(root)
        self.clock = ManualClock()
        self.slept: list[float] = []
        self.onlooker = Onlooker(root, clock=self.clock, sleep=self.sleep)
        self.epoch = 0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    def begin(self, restored: CommitRecord | None = None, *, here: HostBoot | None = None) -> None:
        """A new epoch; its guard is this very process, or one elsewhere."""
        self.epoch += 1
        host = here or HostBoot.here()
        self.chain.append(
            EpochRecord(
                epoch=self.epoch,
                time=0.0,
                attempt=self.epoch,
                host=host.host,
                pid=os.getpid(),
                boot_id=host.boot_id,
                started=enter.started(os.getpid()),
                reason="test",
                restored=restored.policy if restored else None,
                restored_seq=restored.seq if restored else None,
                lease_s=None if self.chain.seen else LEASE_S,
            )
        )
        self.refresh()

    def refresh(self) -> None:
        self.root.lease.touch()
        os.utime(self.root.lease, ns=(0, int(self.clock.time() * 1e9)))

    def commit(self, update: int) -> CommitRecord:
        return self.chain.append(
            CommitRecord(
                epoch=self.epoch,
                time=0.0,
                format_version=1,
                update=update,
                policy=str(PolicyId(self.epoch, update)),
                training_digest="t",
                layout={},
                data_fingerprint="d",
                ledger_checksum="l",
                consumed_digest="c",
                folder=f"checkpoints/{update:06d}-e{self.epoch}",
                files=(),
            )
        )

    def end(self, state: str, update: int, failure: Failure | None = None, **more: str) -> None:
        self.chain.append(
            EndRecord(
                epoch=self.epoch,
                time=0.0,
                state=state,
                activity=more.get("activity"),
                ended_by=more.get("ended_by", "test"),
                update=update,
                failure=failure,
            )
        )

    def view(self, **fields: object) -> None:
        now = self.clock.time()
        rebuilt = workflow.rebuild(self.root, self.chain.seen, now=now)
        moved = Progress(time=now, what="training")
        workflow.write(self.root, rebuilt.model_copy(update={"progress": moved, **fields}))

    def beat(self, count: int) -> None:
        view = workflow.read(self.root)
        beat = view.heartbeat.model_copy(update={"count": count})
        workflow.write(self.root, view.model_copy(update={"heartbeat": beat}))

    def ask(self, step: str, *, after: int = 0):
        parsed = Step.parse(step)
        wanted = Step(kind=parsed.kind, update=parsed.update, set_name=parsed.set_name, after=after)
        return self.onlooker.look(wanted)


def lost(message: str = "gone") -> Failure:
    return Failure.of(SessionLost(message), step="segment/5", time=0.0)


def put(path: Path, **fields: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
