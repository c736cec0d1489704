"""The ledger against a ten-line model, with commits, lost commits, kills and late events."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from runtime.data.history import consumed_prompts, read_history
from runtime.data.ledger import STALE, Ledger
from runtime.data.order import PromptOrder
from runtime.data.samples import PromptId
from runtime.data.segments import LedgerSegment
from runtime.errors import ContractViolation

NO_SUCH_PROMPT = PromptId(9, 0)


class Model:
    """What must hold, without columns, segments or locks: a state and attempt for each prompt."""

    def __init__(self, order: PromptOrder) -> None:
        self.todo = [order.at(i) for i in range(order.total)]
        self.state = dict.fromkeys(self.todo, "remaining")
        self.attempt = dict.fromkeys(self.todo, 0)
        self.queue: list[PromptId] = []
        self.consumed: list[tuple[PromptId, int]] = []
        self.update = 0
        self.num_requeued = 0

    def copy(self) -> "Model":
        other = object.__new__(Model)
        other.todo, other.queue = list(self.todo), list(self.queue)
        other.state, other.attempt = dict(self.state), dict(self.attempt)
        other.consumed, other.update = list(self.consumed), self.update
        other.num_requeued = self.num_requeued
        return other

    def in_state(self, *states: str) -> list[PromptId]:
        return [p for p, s in self.state.items() if s in states]

    def admit(self) -> PromptId | None:
        source = self.queue or self.todo
        if not source:
            return None
        prompt = source.pop(0)
        self.state[prompt] = "in flight"
        self.attempt[prompt] += 1
        return prompt

    def restart(self) -> None:
        pending = self.in_state("queued", "in flight", "finished")  # in the order of the passes
        self.queue = pending
        self.state.update(dict.fromkeys(pending, "queued"))


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        num_prompts=st.integers(1, 7),
        epochs=st.integers(1, 3),
        seed=st.integers(0, 9),
        shuffle=st.booleans(),
    )
    def begin(self, num_prompts: int, epochs: int, seed: int, shuffle: bool) -> None:
        self.identity = {
            "num_prompts": num_prompts,
            "epochs": epochs,
            "seed": seed,
            "shuffle": shuffle,
        }
        self.model = Model(PromptOrder(**self.identity))
        self.ledger = Ledger(PromptOrder(**self.identity))
        self.history: list[bytes] = []
        self.standing = self.model.copy()
        self.commit()  # commit 0, before the first admission

    # --- Events, timely ones -------------------------------------------------------------

    @rule()
    def admit(self) -> None:
        expected = self.model.admit()
        admission = self.ledger.admit()
        if expected is None:
            assert admission is None
        else:
            assert admission is not None
            assert admission.prompt_id == expected
            assert admission.attempt == self.model.attempt[expected]

    @precondition(lambda self: self.model.in_state("in flight"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.model.in_state("in flight")))
        assert self.ledger.finish(prompt, self.model.attempt[prompt])
        assert not self.ledger.finish(prompt, self.model.attempt[prompt])
        self.model.state[prompt] = "finished"

    @precondition(lambda self: self.model.in_state("in flight", "finished"))
    @rule(data=st.data(), reason=st.sampled_from([STALE, "transport"]))
    def requeue(self, data: st.DataObject, reason: str) -> None:
        prompt = data.draw(st.sampled_from(self.model.in_state("in flight", "finished")))
        assert self.ledger.requeue(prompt, self.model.attempt[prompt], reason)
        self.model.state[prompt] = "queued"
        self.model.queue.insert(0, prompt)
        self.model.num_requeued += 1

    @precondition(lambda self: self.model.in_state("in flight", "finished"))
    @rule(data=st.data(), end=st.sampled_from(["filter", "drop", "skip"]))
    def end_without_update(self, data: st.DataObject, end: str) -> None:
        prompt = data.draw(st.sampled_from(self.model.in_state("in flight", "finished")))
        assert getattr(self.ledger, end)(prompt, self.model.attempt[prompt])
        self.model.state[prompt] = {"filter": "filtered", "drop": "dropped", "skip": "skipped"}[end]

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        finished = self.model.in_state("finished")
        taken = data.draw(st.permutations(finished))[: data.draw(st.integers(0, len(finished)))]
        self.model.update += 1
        promised = self.ledger.digest_after(taken, self.model.update)
        groups = [(p, self.model.attempt[p]) for p in taken]
        assert self.ledger.consume(groups, self.model.update) == promised
        for prompt in taken:
            self.model.state[prompt] = "consumed"
            self.model.consumed.append((prompt, self.model.update))

    # --- Events that must change nothing -------------------------------------------------

    @rule()
    def late_events(self) -> None:
        """Every event of every attempt but the present one of a live group."""
        for prompt in [*self.model.state, NO_SUCH_PROMPT]:
            state, present = self.model.state.get(prompt), self.model.attempt.get(prompt, 0)
            for event in ("finish", "requeue", "filter", "drop", "skip"):
                is_live = state == "in flight" or (state == "finished" and event != "finish")
                for attempt in range(-1, present + 2):
                    if not (is_live and attempt == present):
                        args = (STALE,) if event == "requeue" else ()
                        assert getattr(self.ledger, event)(prompt, attempt, *args) is False

    @rule()
    def consume_what_is_not_there(self) -> None:
        good = [(p, self.model.attempt[p]) for p in self.model.in_state("finished")]
        bad = [(NO_SUCH_PROMPT, 1), *good]  # the good ones a second time
        bad += [(p, attempt + 1) for p, attempt in good]
        bad += [(p, a) for p, a in self.model.attempt.items() if (p, a) not in good]
        for key in bad:
            with pytest.raises(ContractViolation, match="not finished, or one twice"):
                self.ledger.consume([*good, key], self.model.update + 1)
        if self.model.update:
            with pytest.raises(ContractViolation, match="consumes after update"):
                self.ledger.consume(good, self.model.update - 1)

    # --- Commits and kills ---------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        segment = self.ledger.snapshot()
        self.history.append(segment.to_bytes())
        self.ledger.committed(segment)
        self.standing = self.model.copy()

    @rule(events=st.integers(0, 3))
    def commit_while_events_go_on(self, events: int) -> None:
        segment, at_snapshot = self.ledger.snapshot(), self.model.copy()
        for _ in range(events):
            self.admit()
        self.history.append(segment.to_bytes())
        self.ledger.committed(segment)
        self.standing = at_snapshot

    @rule()
    def commit_that_fails(self) -> None:
        self.ledger.snapshot()

    @rule(only_newest=st.booleans())
    def kill_and_resume(self, only_newest: bool) -> None:
        segments = self.segments()[-1:] if only_newest else self.segments()
        self.ledger = Ledger.restore(segments, PromptOrder(**self.identity))
        self.model = self.standing.copy()
        self.model.restart()

    # --- What must hold at every point ---------------------------------------------------

    def segments(self) -> list[LedgerSegment]:
        return [LedgerSegment.from_bytes(blob) for blob in self.history]

    @invariant()
    def states_agree(self) -> None:
        self.ledger.check()
        counts = self.ledger.counts()
        states = Counter(self.model.state.values())
        assert counts.pending == states["queued"] + states["in flight"] + states["finished"]
        assert counts.queued == states["queued"]
        assert counts.in_flight == states["in flight"]
        assert counts.finished == states["finished"]
        for end in ("consumed", "filtered", "dropped", "skipped"):
            assert getattr(counts, end) == states[end]
        num_admitted = len(self.model.state) - states["remaining"]
        num_rows = self.identity["num_prompts"]
        begun = max(1, -(-num_admitted // num_rows)) * num_rows
        assert counts.remaining == begun - num_admitted
        assert counts.lost == counts.doubled == 0
        assert counts.requeued == self.model.num_requeued
        assert self.ledger.is_exhausted == (not states["remaining"] and not counts.pending)

    @invariant()
    def committed_history_accounts_for_every_prompt(self) -> None:
        report = read_history(self.segments())
        states = Counter(self.standing.state.values())
        assert report.lost == report.doubled == 0
        assert report.requeued == self.standing.num_requeued
        for end in ("consumed", "filtered", "dropped", "skipped"):
            assert getattr(report, end) == states[end]
        assert report.pending == states["queued"] + states["in flight"] + states["finished"]
        assert list(consumed_prompts(self.segments())) == self.standing.consumed


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
