"""Passes at once, and in any order with kills, lost calls and results."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from runtime.evaluation import receipts, submission
from runtime.evaluation.background import IN_FLIGHT
from runtime.evaluation.records import TryError
from runtime.evaluation.submission import JobsAway
from tests.runtime.evaluation.owed import Owed


def test_two_passes_at_once_submit_each_once_and_never_more_than_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_TURN_S", 3.0)
    owed = Owed(tmp_path)
    for update in (2, 4, 6, 8):
        owed.ask(update, "final")
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def walk() -> None:
        barrier.wait()
        try:
            owed.submit()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(owed.jobs.orders) == IN_FLIGHT


class Submissions(RuleBasedStateMachine):
    """Any order of passes, kills, lost calls and results."""

    folder: Callable[[], Path]

    @initialize()
    def begin(self) -> None:
        self.owed = Owed(self.folder())
        self.folders = dict(self._ask())
        self.succeeded: dict[int, float] = {}

    def _ask(self) -> list[tuple[int, Path]]:
        kinds = {2: "cadence", 4: "cadence", 6: "cadence", 8: "final"}
        asked = [(update, self.owed.ask(update, kind)) for update, kind in kinds.items()]
        return [*asked, (10, self.owed.ask_at_the_end(10))]

    @rule(loses=st.sampled_from(["", "loses_answers", "loses_calls"]))
    def walk(self, loses: str) -> None:
        if loses:
            setattr(self.owed.jobs, loses, True)
        try:
            self.owed.submit()
        except JobsAway:
            assert loses
        finally:
            self.owed.jobs.loses_answers = self.owed.jobs.loses_calls = False

    @rule(update=st.sampled_from([2, 4, 6, 8, 10]), how=st.sampled_from(["end", "crash", "fail"]))
    def job_ends(self, update: int, how: str) -> None:
        receipt = receipts.derive(self.folders[update], stands=True)
        open_ = None if receipt is None else receipt.open_try
        if open_ is None or self.owed.jobs.state(open_.submission.key) != "alive":
            return
        if how == "end":
            self.owed.end(self.folders[update], metrics={"mean": float(len(receipt.tries))})
            self.succeeded[update] = float(len(receipt.tries))
        elif how == "crash":
            self.owed.crash(self.folders[update])
        else:
            number = len(receipt.tries)
            error = TryError(error_class="E", fingerprint=f"f{number}", message="m")
            self.owed.end(self.folders[update], state="failed", error=error)

    @rule(seconds=st.sampled_from([1.0, 599.0, 5000.0]))
    def wait(self, seconds: float) -> None:
        self.owed.clock.advance(seconds)

    @invariant()
    def no_key_twice_and_never_three_at_once(self) -> None:
        keys = [key for key, _ in self.owed.jobs.orders]
        assert len(keys) == len(set(keys))
        tries = [(order.policy, order.number) for _, order in self.owed.jobs.orders]
        assert len(tries) == len(set(tries))
        alive = [key for key, state in self.owed.jobs.states.items() if state == "alive"]
        assert len(alive) <= IN_FLIGHT

    @invariant()
    def a_result_stands_and_nothing_comes_after_it(self) -> None:
        for update, mean in self.succeeded.items():
            receipt = receipts.derive(self.folders[update], stands=True)
            assert receipt is not None
            assert receipt.result is not None
            assert receipt.result.metrics["mean"] == mean
            assert len(receipt.tries) == mean
        for update in (2, 4, 6):
            assert len(receipts.derive(self.folders[update], stands=True).tries) <= 1
        assert len(receipts.derive(self.folders[8], stands=True).tries) <= 4
        assert len(receipts.derive(self.folders[10], stands=True).tries) <= 5  # the first is "busy"


def test_any_order_of_passes_and_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Machine(Submissions):
        folder = staticmethod(lambda: tmp_path_factory.mktemp("owed"))

    settings_ = settings(max_examples=15, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(Machine, settings=settings_)
