"""Lease and chain together: owners that freeze, contenders that wait, and who may write.

The marker is a real file and the chain a real folder; who looks at it when is drawn, and every
process has a clock of its own that stands still for nobody.
"""

import os
import shutil
import tempfile

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.clock import ManualClock
from runtime.errors import FencedError
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.lease import LeaseWatch, again_s
from runtime.rundir.liveness import Mark, Watch
from tests.runtime.rundir.test_chain_machine import commit_record, epoch_record

LEASE_S = 30.0
REFRESH_S = LEASE_S / 3


class Owner:
    """A guard with its session: refreshes the marker, looks at its lease, commits."""

    def __init__(self, root, clock, epoch):
        self.root, self.clock, self.epoch = root, clock, epoch
        self.chain = Chain(root)
        self.chain.read()
        self.update = 0
        self.is_frozen = False
        self.has_left = False
        self.awake_since = clock.monotonic()
        mark = Mark.of(root.lease)
        self.identity = mark.identity
        self.watch = LeaseWatch(root.lease, duration_s=LEASE_S, identity=mark.identity, clock=clock)
        self.watch.lost()

    def tick(self):
        """What it does every few seconds while it runs."""
        if self.has_left or self.is_frozen:
            return
        # Queued messages first: a refresh that was due goes out before any deadline is judged.
        mark = Mark.of(self.root.lease)
        if mark is not None and mark.identity == self.identity:
            os.utime(self.root.lease, ns=(0, int(self.clock.monotonic() * 1e9)))
        if self.watch.lost() is not None:
            self.has_left = True


class OwnershipMachine(RuleBasedStateMachine):
    """The model: the newest epoch owns the run; no owner that runs is ever taken over."""

    def __init__(self):
        super().__init__()
        self.root = RunRoot.of(tempfile.mkdtemp())
        self.root.create()
        self.clock = ManualClock()
        self.owners = []
        self.contender = None
        self.history = []
        self.keep = []
        self.take_over()

    def take_over(self):
        """The marker is swapped as filelock does it: another file under the name."""
        if self.root.lease.exists():
            # Held open, as its owner does: no other file gets its inode number meanwhile.
            self.keep.append(self.root.lease.open())
            self.root.lease.unlink()
        self.root.lease.write_text("owner")
        os.utime(self.root.lease, ns=(0, int(self.clock.monotonic() * 1e9)))
        chain = Chain(self.root)
        records = chain.read()
        commit = history.newest_commit(records)
        epoch = len(self.owners) + 1
        chain.append(epoch_record(epoch, commit, first=not records))
        self.history.append(("epoch", epoch))
        owner = Owner(self.root, self.clock, epoch)
        owner.update = commit.update if commit else -1
        self.owners.append(owner)
        self.contender = None

    @property
    def present(self):
        return self.owners[-1]

    @rule(seconds=st.integers(1, 80))
    def time_passes(self, seconds):
        """Owners that run tick every two seconds, a contender looks as often."""
        for _ in range(seconds // 2 + 1):
            self.clock.advance(2.0)
            for owner in self.owners:
                owner.tick()
            self.look()

    @rule()
    @precondition(lambda self: self.contender is None)
    def contend(self):
        """A new attempt on another host; all it knows of the owner is the marker."""
        self.contender = Watch(self.clock, limit_s=LEASE_S, again_s=again_s(LEASE_S))
        self.look()

    def look(self):
        if self.contender is None or not self.contender.has_lapsed(Mark.of(self.root.lease)):
            return
        owner = self.present
        frozen_s = self.clock.monotonic() - owner.awake_since if owner.is_frozen else 0.0
        assert owner.has_left or frozen_s >= LEASE_S - REFRESH_S, "a running owner was taken over"
        self.take_over()

    @rule(which=st.integers(0, 20))
    def freeze(self, which):
        owner = self.owners[which % len(self.owners)]
        if not owner.is_frozen:
            owner.is_frozen, owner.awake_since = True, self.clock.monotonic()

    @rule(which=st.integers(0, 20), writes_first=st.booleans())
    def thaw(self, which, writes_first):
        """It may have stood right before a write, which is then the first thing it does."""
        owner = self.owners[which % len(self.owners)]
        if owner.is_frozen:
            owner.is_frozen, owner.awake_since = False, self.clock.monotonic()
            if writes_first:
                self.commit(which)
            owner.tick()

    @rule(which=st.integers(0, 20))
    def commit(self, which):
        owner = self.owners[which % len(self.owners)]
        if owner.is_frozen or owner.has_left:
            return
        try:
            owner.chain.append(commit_record(owner.epoch, owner.update + 1))
        except FencedError:
            assert owner is not self.present
            owner.has_left = True
            return
        assert owner is self.present, "an old owner wrote history"
        owner.update += 1
        self.history.append(("commit", owner.epoch))

    @rule()
    def lose_the_marker(self):
        """Somebody deletes it by hand: its owner leaves, and nothing is written twice."""
        if self.root.lease.exists() and len(self.keep) < 4:
            self.keep.append(self.root.lease.open())
            self.root.lease.unlink()

    @invariant()
    def only_the_newest_epoch_writes(self):
        records = Chain(self.root).read()
        assert [(r.kind, r.epoch) for r in records] == self.history
        epochs = [epoch for _, epoch in self.history]
        assert epochs == sorted(epochs)

    @invariant()
    def an_old_owner_that_runs_leaves_on_its_second_look(self):
        for owner in self.owners[:-1]:
            if not (owner.is_frozen or owner.has_left):
                awake = self.clock.monotonic() - owner.awake_since
                assert awake <= again_s(LEASE_S) + 2.0

    def teardown(self):
        for file in self.keep:
            file.close()
        shutil.rmtree(self.root.path)


TestOwnershipMachine = OwnershipMachine.TestCase
TestOwnershipMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
