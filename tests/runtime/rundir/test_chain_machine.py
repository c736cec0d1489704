"""The chain against a ten-line model: several writers, crashes between any two file operations."""

import itertools
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from runtime.errors import FencedError
from runtime.policy import PolicyId
from runtime.rundir import atomic, history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord


class Crash(BaseException):
    """The process is gone; no handler of the code under test may run on after it."""


def epoch_record(epoch: int, restored: CommitRecord | None, *, first: bool) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        time=0.0,
        attempt=1,
        host="h",
        pid=1,
        boot_id="b",
        started=1.0,
        reason="test",
        restored=restored.policy if restored else None,
        restored_seq=restored.seq if restored else None,
        lease_s=30.0 if first else None,
    )


def commit_record(epoch: int, update: int) -> CommitRecord:
    return CommitRecord(
        epoch=epoch,
        time=0.0,
        format_version=1,
        update=update,
        policy=str(PolicyId(epoch, update)),
        training_digest="d",
        layout={},
        data_fingerprint="f",
        ledger_checksum="l",
        consumed_digest="c",
        folder=f"checkpoints/{update:06d}-e{epoch}",
        files=(),
    )


class Writer:
    """A process: what it has seen, which epoch it owns, how far it trained."""

    def __init__(self, root: RunRoot) -> None:
        self.chain = Chain(root)
        self.epoch = 0
        self.update = -1


class ChainMachine(RuleBasedStateMachine):
    """The model is a list of (kind, epoch, update); whoever extends it last owns the run."""

    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.root = RunRoot.of(tempfile.mkdtemp())
        self.root.create()
        self.model: list[tuple[str, int, int]] = []
        self.owner: Writer | None = None
        self.dead: set[int] = set()

    def teardown(self) -> None:
        atomic.probe = None
        shutil.rmtree(self.root.path)

    # -- the model ------------------------------------------------------------------------------

    def model_epoch(self) -> int:
        return max((e for kind, e, _ in self.model if kind == "epoch"), default=0)

    def model_commits(self) -> list[tuple[int, int]]:
        """(epoch, update) of standing commits: an epoch record cuts off what lies above it."""
        standing: list[tuple[int, int]] = []
        for kind, epoch, update in self.model:
            if kind == "epoch":
                standing = [c for c in standing if c[1] <= update]
            elif kind == "commit":
                standing.append((epoch, update))
        return standing

    def committed(self) -> int:
        return max((update for _, update in self.model_commits()), default=-1)

    # -- rules ----------------------------------------------------------------------------------

    @rule(target=writers)
    def start(self) -> Writer:
        return Writer(self.root)

    @precondition(lambda self: self.owner is not None)
    @rule(target=writers)
    def join(self) -> Writer:
        """A second process of the owner's epoch: guard and session append by turns."""
        writer = Writer(self.root)
        writer.epoch, writer.update = self.owner.epoch, self.owner.update
        return writer

    @rule(
        writer=writers,
        back=st.integers(0, 2),
        crash=st.none() | st.integers(0, 7),
        looks=st.booleans(),
    )
    def take_over(self, writer: Writer, back: int, crash: int | None, looks: bool) -> None:
        """Become owner, restoring the newest commit or an older one (the newer ones damaged)."""
        if id(writer) in self.dead:
            return
        records = writer.chain.read() if looks else writer.chain.seen
        commits = history.standing_commits(records)
        restored = commits[max(0, len(commits) - 1 - back)] if commits else None
        newest = history.newest_epoch(records)
        record = epoch_record(newest.epoch + 1 if newest else 1, restored, first=not records)
        if self.append(writer, record, crash, ("epoch", record.epoch, record.restored_update)):
            writer.epoch = record.epoch
            writer.update = record.restored_update
            self.owner = writer

    @precondition(lambda self: self.model)
    @rule(writer=writers, more=st.integers(1, 3), crash=st.none() | st.integers(0, 7))
    def commit(self, writer: Writer, more: int, crash: int | None) -> None:
        if id(writer) in self.dead or writer.epoch == 0:
            return
        update = max(writer.update, self.committed()) + more
        if self.append(
            writer, commit_record(writer.epoch, update), crash, ("commit", writer.epoch, update)
        ):
            writer.update = update

    @rule(writer=writers, crash=st.none() | st.integers(0, 7))
    def end(self, writer: Writer, crash: int | None) -> None:
        if id(writer) in self.dead or writer.epoch == 0:
            return
        record = EndRecord(
            epoch=writer.epoch,
            time=0.0,
            state="training",
            activity="stopped",
            ended_by="test",
            update=max(writer.update, 0),
        )
        self.append(writer, record, crash, ("end", writer.epoch, record.update))

    @rule(writer=writers)
    def look(self, writer: Writer) -> None:
        writer.chain.read()

    def append(self, writer, record, crash, entry) -> bool:
        """Append under a crash before file operation number ``crash``; True if it went in alive.

        A stale owner fails whatever it does. The model learns of a crashed append from the file.
        """
        operations = itertools.count()

        def probe(operation: str, path: Path) -> None:
            if crash is not None and next(operations) >= crash:
                raise Crash(operation)

        atomic.probe = probe
        # Whoever has not seen the last record collides, even in its own epoch: it must look first.
        is_stale = len(writer.chain.seen) != len(self.model) or (
            entry[0] != "epoch" and writer.epoch != self.model_epoch()
        )
        name = self.root.chain / f"{len(self.model)}.json"
        try:
            writer.chain.append(record)
        except FencedError:
            assert is_stale
            assert not name.exists()
            # Superseded once, an instance appends no more: the process is over.
            self.dead.add(id(writer))
            return False
        except Crash:
            self.dead.add(id(writer))
            if name.exists():
                assert not is_stale
                self.model.append(entry)
            return False
        finally:
            atomic.probe = None
        assert not is_stale
        self.model.append(entry)
        return True

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def history_equals_the_model(self) -> None:
        records = Chain(self.root).read()
        assert [(r.kind, r.epoch) for r in records] == [(k, e) for k, e, _ in self.model]
        standing = history.standing_commits(records)
        assert [(c.epoch, c.update) for c in standing] == self.model_commits()
        for commit in (r for r in records if isinstance(r, CommitRecord)):
            policy = PolicyId.parse(commit.policy)
            assert history.is_standing(records, policy) == (commit in standing)

    @invariant()
    def epochs_only_grow_by_one(self) -> None:
        epochs = [e for kind, e, _ in self.model if kind == "epoch"]
        assert epochs == list(range(1, len(epochs) + 1))


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("operations", range(8))
def test_an_append_is_whole_or_absent_wherever_it_is_cut(tmp_path: Path, operations: int) -> None:
    root = RunRoot.of(tmp_path)
    root.create()
    done = []

    def probe(operation: str, path: Path) -> None:
        if len(done) == operations:
            raise Crash(operation)
        done.append(operation)

    chain = Chain(root)
    atomic.probe = probe
    try:
        chain.append(epoch_record(1, None, first=True))
        assert done == ["write", "fsync", "link", "unlink", "fsync_folder"]
    except Crash:
        pass
    finally:
        atomic.probe = None
    records = Chain(root).read()
    assert len(records) == ("unlink" in done or operations == 3)
    Chain(root).read()
