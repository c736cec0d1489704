"""A run in memory for the tests of this room: a ledger, a trainer's state, the chain's owner."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import anyio

from runtime.checkpoints.commit import Committer
from runtime.checkpoints.identity import RunIdentity
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.policy import PolicyId
from runtime.rundir import atomic
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EpochRecord
from runtime.trainer.protocol import StagedState

IDENTITY = RunIdentity(training_digest="t" * 64, layout={"data": 1}, data_fingerprint="d" * 64)


def take_over(root: RunRoot, restored=None) -> int:
    """Become owner; returns the epoch."""
    chain = Chain(root)
    records = chain.read()
    epoch = max((r.epoch for r in records), default=0) + 1
    chain.append(
        EpochRecord(
            epoch=epoch, time=time.time(), attempt=epoch, host="here", pid=os.getpid(), boot_id="b",
            started=0.0, reason="test", lease_s=None if records else 30.0,
            restored=None if restored is None else restored.policy,
            restored_seq=None if restored is None else restored.seq,
        )
    )  # fmt: skip
    return epoch


class TinyState:
    """Trainer state: one number and the digest, in two files. Writing can be held up."""

    def __init__(self) -> None:
        self.update = 0
        self.digest = ""
        self.staged: dict[str, dict[str, object]] = {}
        self.may_write = anyio.Event()
        self.may_write.set()
        self.error: BaseException | None = None
        self.padding = 100

    async def stage(self) -> list[StagedState]:
        token = f"t{len(self.staged)}"
        self.staged[token] = {"update": self.update, "consumed_digest": self.digest}
        return [StagedState(token=token, bytes=64, stall_s=0.001)]

    async def write_staged(self, staged, folder: str) -> dict[str, str | None]:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        state = self.staged[staged[0].token]
        for name, text in (("a.json", json.dumps(state)), ("b.bin", "x" * self.padding)):
            atomic.point("write", Path(folder, name))
            Path(folder, name).write_text(text)  # noqa: ASYNC240 - a few bytes
        return {"a.json": None, "b.bin": None}


class TinyRun:
    """One epoch of a run: trains by counting."""

    def __init__(self, root: RunRoot, epoch: int, tasks, *, parent=None, ledger=None) -> None:
        self.root = root
        self.epoch = epoch
        self.ledger = ledger or Ledger(PromptOrder(64, epochs=2))
        self.error: Exception | None = None
        """Raised once a record stands."""
        self.state = TinyState()
        self.state.update = 0 if parent is None else parent.update
        self.state.digest = self.ledger.digest
        self.committer = Committer(
            root=root, epoch=epoch, identity=IDENTITY, source=self.state, tasks=tasks,
            on_committed=self.committed, parent=parent,
        )  # fmt: skip

    async def committed(self, record, segment) -> None:
        self.ledger.committed(segment)
        if self.error is not None:
            raise self.error

    @property
    def policy(self) -> PolicyId:
        return PolicyId(self.epoch, self.state.update)

    def train(self, groups: int = 2) -> None:
        taken = [self.ledger.admit() for _ in range(groups + 1)]  # one stays pending
        keys = [(a.prompt_id, a.attempt) for a in taken[:groups]]
        for key in keys:
            assert self.ledger.finish(*key)
        self.state.update += 1
        self.ledger.consume(keys, self.state.update)
        self.state.digest = self.ledger.digest

    async def begin(self) -> None:
        model = {"path": "prepared/model", "digest": "m"}
        await self.committer.commit_initial(self.ledger.snapshot(), self.policy, model)

    async def boundary(self):
        return await self.committer.boundary(self.policy, self.ledger.snapshot)


def new_root(path: Path) -> RunRoot:
    root = RunRoot.of(path)
    root.create()
    return root


async def trained(root: RunRoot, updates: int) -> None:
    """One epoch that commits its start and every update."""
    async with anyio.create_task_group() as tasks:
        run = TinyRun(root, take_over(root), tasks)
        await run.begin()
        for _ in range(updates):
            run.train()
            await run.boundary()
            await run.committer.settle()
