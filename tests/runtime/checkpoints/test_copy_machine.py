"""A run and its copy against a model: rewinds, lost machines, cuts at every counted call."""

from __future__ import annotations

import itertools
from contextlib import closing

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.runtime.checkpoints.copied_run import CopiedRun
from tests.runtime.checkpoints.memory_bucket import Fault

AWAY = ("away", 0)
FAULTS = st.sampled_from([None, "crash", "away", "lost"]).flatmap(
    lambda kind: st.none() if kind is None else st.tuples(st.just(kind), st.integers(0, 15))
)


class CopyMachine(RuleBasedStateMachine):
    """One machine at a time; it is lost with all that was on it, and the store stays."""

    def __init__(self) -> None:
        super().__init__()
        self.run = CopiedRun()
        self.run.start()

    def teardown(self) -> None:
        self.run.close()

    @rule(damaged=st.integers(0, 2), fault=FAULTS)
    def take_over(self, damaged: int, fault: Fault) -> None:
        self.run.take_over(damaged, fault)

    @rule(fault=FAULTS)
    def go_on(self, fault: Fault) -> None:
        self.run.go_on(fault)

    @rule(updates=st.integers(1, 3))
    def train(self, updates: int) -> None:
        self.run.train(updates)

    @rule()
    def roll(self) -> None:
        self.run.roll()

    @rule(fault=FAULTS)
    def copy(self, fault: Fault) -> None:
        self.run.copy(fault)

    @rule(fault=FAULTS)
    def copy_by_hand(self, fault: Fault) -> None:
        self.run.copy_by_hand(fault)

    @rule(fault=FAULTS, which=st.integers(0, 5))
    def copy_late(self, fault: Fault, which: int) -> None:
        self.run.copy_late(fault, which)

    @rule(faults=st.lists(FAULTS, max_size=2))
    def lose(self, faults: list[Fault]) -> None:
        self.run.lose(faults)


TestCopyMachine = CopyMachine.TestCase
TestCopyMachine.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


def is_away(run: CopiedRun) -> None:
    """Two updates that the store knows nothing of, nor of their epoch."""
    run.take_over(0, AWAY)
    run.train(2)


def is_untold(run: CopiedRun) -> None:
    run.start()
    run.take_over(0, AWAY)


def rolls_untold(run: CopiedRun) -> None:
    is_untold(run)
    run.roll()


def is_ahead(run: CopiedRun) -> None:
    run.start()
    run.train(2)
    run.copy(None)


def is_held(run: CopiedRun) -> None:
    is_ahead(run)
    run.take_over(1, AWAY)


def is_rewound(run: CopiedRun) -> None:
    is_ahead(run)
    run.take_over(1, None)


def trains(run: CopiedRun, fault: Fault) -> None:
    run.train(1)
    run.copy(fault)


def resumes(run: CopiedRun, fault: Fault) -> None:
    run.take_over(0, fault)


def rewinds(run: CopiedRun, fault: Fault) -> None:
    run.take_over(2, fault)


def copies_late(run: CopiedRun, fault: Fault) -> None:
    run.copy_late(fault, 0)


STORIES = {
    "what an epoch made that is not known yet": (is_untold, trains),
    "evidence of such an epoch": (rolls_untold, CopiedRun.copy_by_hand),
    "a first copy": (is_away, CopiedRun.copy),
    "an epoch before the first copy": (is_away, resumes),
    "a rewind": (is_ahead, rewinds),
    "a rewind, once more": (is_held, CopiedRun.go_on),
    "a rewind, by hand": (is_held, CopiedRun.copy_by_hand),
    "a late copy before a rewind": (is_held, copies_late),
    "a late copy behind a rewind": (is_rewound, copies_late),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_run_that_is_cut_off_at_any_call(story: str) -> None:
    """Its machine is lost at once, and the next one later; or it goes on first, without a store."""
    before, cut_off = STORIES[story]
    with closing(CopiedRun()) as begun:
        before(begun)
        for number in itertools.count():
            with closing(begun.fork()) as run:
                cut_off(run, ("crash", number))
                with closing(run.fork()) as other:
                    other.go_on(AWAY)
                    other.lose([])
                is_over = not run.has_struck
                run.lose([])
                run.train(1)
                run.copy(None)
                run.lose([])
            if is_over:
                break
