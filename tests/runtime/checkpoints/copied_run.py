"""A run whose machines are lost, with its copy in a store, and what is to be true of them.

The model is the lineage: the commits that stand, oldest first. A machine that starts empty goes on
from one of them, never from one that was undone, and from no less than the newest whose copy was
said to be whole.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio

from runtime.checkpoints.bucket import StoreUnreachable
from runtime.checkpoints.download import restore_copy
from runtime.checkpoints.resume import Restorable, find_restorable
from runtime.checkpoints.retention import retain
from runtime.checkpoints.upload import copy_commit, make_known
from runtime.checkpoints.uploads import Uploads
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.errors import PartialWrite
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord
from runtime.session.succession import newest_valid
from tests.runtime.checkpoints.memory_bucket import Crash, Fault, MemoryBucket, cut
from tests.runtime.checkpoints.tiny_run import TinyRun, new_root
from tests.runtime.checkpoints.tiny_run import take_over as begin_epoch

KEEP, KEEP_IN_STORE = 3, 1
ORDER = PromptOrder(1000, epochs=2)
Key = tuple[str, float]


def key(commit: CommitRecord) -> Key:
    """Two commits of one policy id differ in it."""
    return commit.policy, commit.time


class CopiedRun:
    """One machine at a time; it is lost with all that was on it, and the store stays."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.bucket = MemoryBucket()
        self.num_machines = 0
        self.root = self.new_machine()
        self.epoch: int | None = None
        """Of the present owner; None while nobody owns the run."""
        self.has_begun = False
        """The session of the epoch is past its first step: it may publish and commit."""
        self.lineage: list[Key] = []
        self.in_doubt: list[Key] = []
        """Passed over by an epoch that has not begun, so nothing contradicts them yet."""
        self.undone: set[Key] = set()
        self.whole: Key | None = None
        """The newest of the lineage whose copy was said to be whole."""
        self.known_epochs: set[int] = set()
        self.evidence: dict[Key, bytes] = {}
        self.has_struck = False
        """The last fault has: otherwise its number was beyond all calls."""

    def fork(self) -> CopiedRun:
        """The same run and store once more; what is done to one, the other does not see."""
        other = copy.deepcopy(self)
        other.folder = Path(tempfile.mkdtemp())
        other.root = RunRoot.of(other.folder / self.root.path.name)
        shutil.copytree(self.root.path, other.root.path)
        return other

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def new_machine(self) -> RunRoot:
        self.num_machines += 1
        return new_root(self.folder / str(self.num_machines))

    @contextmanager
    def cut(self, fault: Fault) -> Iterator[None]:
        self.has_struck = False
        with cut(self.bucket, fault) as made:
            try:
                yield
            finally:
                self.has_struck = made.has_struck

    def die(self) -> None:
        self.epoch, self.has_begun = None, False

    # -- rules ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Two commits, and copies of both."""
        self.train(updates=1)
        self.copy(fault=None)

    def take_over(self, damaged: int, fault: Fault) -> None:
        """A guard takes the run over; the newest commits on the disk may be damaged: a rewind."""
        records = Chain(self.root).read()
        for commit in history.standing_commits(records)[1:][-damaged:] if damaged else ():
            for path in (self.root.path / commit.folder).glob("*.json"):
                path.write_bytes(b"")
        commit = newest_valid(self.root, records).commit
        stands = 0 if commit is None else self.lineage.index(key(commit)) + 1
        self.in_doubt = self.lineage[stands:] + self.in_doubt
        self.lineage = self.lineage[:stands]
        self.epoch, self.has_begun = begin_epoch(self.root, restored=commit), False
        assert self.epoch not in self.known_epochs, "an epoch's number came twice"
        self.begin(fault)

    def go_on(self, fault: Fault) -> None:
        """A session that waits for the store tries once more; a lost one has a successor."""
        if self.epoch is None:
            self.take_over(0, fault)
        elif not self.has_begun:
            self.begin(fault)

    def going(self) -> None:
        """What follows needs a session that is past its first step."""
        self.go_on(None)
        assert self.has_begun

    def begin(self, fault: Fault) -> None:
        """The session's first step; what goes on beside it may fail for want of the store."""
        uploads = Uploads(self.root, self.bucket, keep=KEEP_IN_STORE, record=lambda *_, **__: None)
        is_rewound = bool(self.in_doubt)
        try:
            with self.cut(fault):
                anyio.run(uploads.tell_rewinds)
                with suppress(StoreUnreachable):
                    make_known(self.root, self.bucket, keep=KEEP_IN_STORE)
                    self.known_epochs.add(self.owned)
        except StoreUnreachable:
            assert is_rewound or self.undone, "a store that is away ends nothing"
            return
        except Crash:
            return self.die()
        self.has_begun = True
        self.undone |= {*self.in_doubt}
        self.in_doubt = []
        if is_rewound:
            self.whole = self.lineage[-1]
        if not self.lineage:
            self.commit(None)

    def train(self, updates: int) -> None:
        self.going()
        for _ in range(updates):
            self.commit(self.restorable())
            retain(self.root, self.owned, keep=KEEP)

    def roll(self) -> None:
        """Evidence of the update in hand, which no commit holds yet."""
        self.going()
        self.roll_out(self.restorable().commit.update + 1)

    def copy(self, fault: Fault) -> None:
        self.going()
        newest = history.newest_commit(Chain(self.root).read())
        assert newest is not None
        self.send(newest, fault)

    def copy_by_hand(self, fault: Fault) -> None:
        """``milepost upload``, whoever owns the run, if anybody does."""
        newest = history.newest_commit(Chain(self.root).read())
        if newest is not None and self.is_there(newest):
            self.send(newest, fault)

    def copy_late(self, fault: Fault, which: int) -> None:
        """An owner that was passed over wakes up over its copy."""
        commits = [r for r in Chain(self.root).read() if isinstance(r, CommitRecord)]
        gone = [c for c in commits if key(c) in {*self.undone, *self.in_doubt}]
        if gone:
            self.send(gone[which % len(gone)], fault)

    def send(self, commit: CommitRecord, fault: Fault) -> None:
        try:
            with self.cut(fault):
                copy_commit(self.root, self.bucket, commit, keep=KEEP_IN_STORE)
        except (StoreUnreachable, PartialWrite):
            return
        except Crash:
            return self.die()
        if self.lineage[-1:] == [key(commit)]:
            self.whole = key(commit)
            self.undone |= {*self.in_doubt}
            self.in_doubt = []

    def lose(self, faults: list[Fault]) -> None:
        """The machine is gone; another one starts empty, and may be cut off over it."""
        shutil.rmtree(self.root.path)
        self.root = self.new_machine()
        self.die()
        for fault in (*faults, None):
            try:
                with self.cut(fault):
                    restored = restore_copy(self.root, self.bucket)
            except (StoreUnreachable, PartialWrite, Crash):
                assert fault is not None
                continue
            break
        known = history.standing_commits(Chain(self.root).read())
        could_be, doubtful = self.lineage + self.in_doubt, len(self.in_doubt)
        self.in_doubt = []
        self.lineage = [key(c) for c in known]
        if restored is None and known:
            # An earlier try was cut off behind its last step.
            restored = newest_valid(self.root, Chain(self.root).read()).commit
        if restored is None:
            assert self.whole is None, "a whole copy was not found"
            self.lineage = []
            return
        assert key(restored) not in self.undone, "what was undone came back"
        assert key(restored) in could_be
        assert self.lineage == could_be[: len(self.lineage)]
        if self.whole is not None:
            floor = min(could_be.index(self.whole), len(could_be) - doubtful - 1)
            assert could_be.index(key(restored)) >= floor
        self.whole = key(restored)
        found = self.restorable()
        assert (found.commit, found.history_gap) == (restored, None)
        for each in could_be[1 : could_be.index(key(restored)) + 1]:
            assert self.evidence_of(each[0]).read_bytes() == self.evidence[each]

    # -- the run ----------------------------------------------------------------------------------

    def restorable(self) -> Restorable:
        found = find_restorable(self.root, Chain(self.root).read())
        assert found is not None
        assert Ledger.restore(found.segments, ORDER).digest == found.commit.consumed_digest
        return found

    def is_there(self, commit: CommitRecord) -> bool:
        """Its state was brought to this machine, or made on it."""
        return (self.root.path / commit.folder).is_dir()

    @property
    def owned(self) -> int:
        assert self.epoch is not None
        return self.epoch

    @property
    def is_held(self) -> bool:
        """The session could not take its first step for want of the store."""
        return self.epoch is not None and not self.has_begun

    def commit(self, found: Restorable | None) -> None:
        # Two machines make two ledgers of one number of updates.
        groups = 1 + self.num_machines
        made = anyio.run(partial(_commit, self.root, self.owned, found, groups))
        self.lineage.append(key(made))
        if made.update:
            self.evidence[key(made)] = self.roll_out(made.update)

    def evidence_of(self, policy: str) -> Path:
        epoch, _, update = policy.removeprefix("e").partition(".u")
        return self.root.rollouts / f"{int(update):06d}-e{epoch}.parquet"

    def roll_out(self, update: int) -> bytes:
        """Written once by whoever collects, as the rows of a collection are."""
        policy = f"e{self.owned}.u{update}"
        rows = f"rows of machine {self.num_machines}".encode()
        path = self.evidence_of(policy)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rows)
        return rows


async def _commit(root: RunRoot, epoch: int, found: Restorable | None, groups: int) -> CommitRecord:
    """Commit 0, or one more update upon what was found."""
    async with anyio.create_task_group() as tasks:
        parent = None if found is None else found.commit
        ledger = Ledger(ORDER) if found is None else Ledger.restore(found.segments, ORDER)
        run = TinyRun(root, epoch, tasks, parent=parent, ledger=ledger)
        if parent is None:
            await run.begin()
        else:
            run.train(groups)
            await run.boundary()
        made = await run.committer.settle()
        assert made is not None
    return made
