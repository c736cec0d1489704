"""What is submitted, and when: receipts, a store of jobs, and a clock."""

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

from runtime.clock import ManualClock
from runtime.evaluation import files, receipts, submission
from runtime.evaluation.background import IN_FLIGHT
from runtime.evaluation.job import JobOrder
from runtime.evaluation.reading import receipts_of
from runtime.evaluation.records import Request, Result, Started, TryError
from runtime.evaluation.submission import JobsAway, JobState, Row, Rules, submit_due
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EndRecord
from tests.runtime.session.attempted import commit, own


class Jobs:
    """Keeps of the real ones: a key is one job, however often it is asked for; it may be away."""

    def __init__(self) -> None:
        self.states: dict[str, JobState] = {}
        self.orders: list[tuple[str, JobOrder]] = []
        self.is_away = False
        self.loses_answers = False
        self.loses_calls = False
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.is_away:
            raise JobsAway("no deployment")

    def state(self, key: str) -> JobState:
        return self.states.get(key, "absent")

    def submit(self, key: str, order: JobOrder) -> str:
        if self.loses_calls:
            raise JobsAway("connection refused")
        with self._lock:
            if key not in self.states:
                self.states[key] = "alive"
                self.orders.append((key, order))
        if self.loses_answers:
            raise JobsAway("connection reset")
        return f"job {key}"


class Owed:
    """A run of one epoch with commits, whose evaluations are asked for one by one."""

    def __init__(self, folder: Path) -> None:
        self.root = RunRoot(folder / "run")
        self.root.create()
        own(self.root, epoch=1)
        self.jobs = Jobs()
        self.clock = ManualClock()
        self.clock.advance(1000.0)

    def ask(self, update: int, kind: str = "cadence", **fields: object) -> Path:
        commit(self.root.path, update=update)
        folder = self.root.evaluation(f"e1.u{update}", "held")
        request = {
            "time": self.clock.time(), "run": "owed", "policy": f"e1.u{update}", "set": "held",
            "kind": kind, "required": kind == "final", "mode": "background", "attempt": 1,
            "epoch": 1, "set_digest": "d", "sampling": {}, "seed": 0, **fields,
        }  # fmt: skip
        files.write_request(folder, Request.model_validate(request))
        return folder

    def ask_at_the_end(self, update: int) -> Path:
        """The run ends where the cadence was skipped as busy."""
        folder = self.ask(update)
        files.skip(folder, "busy", time=self.clock.time())
        last = {"kind": "final", "required": True, "time": self.clock.time()}
        files.ask_once(folder, request_of(folder).model_copy(update=last))
        return folder

    def submit(self, **rules: object) -> dict[int, Row]:
        asked = Rules(by="test", **rules)  # type: ignore[arg-type]
        rows = submit_due(self.root, self.jobs, asked, clock=self.clock)
        return {row.update: row for row in rows}

    def end(self, folder: Path, **result: object) -> None:
        """The newest try's job writes its result and ends."""
        (newest,) = receipts.derive(folder, stands=True).tries[-1:]
        made = {"time": self.clock.time(), "state": "succeeded", **result}
        files.finish_try(folder, newest.number, Result.model_validate(made))
        self.jobs.states[newest.submission.key] = "over"

    def crash(self, folder: Path) -> None:
        """The newest try's job is killed."""
        (newest,) = receipts.derive(folder, stands=True).tries[-1:]
        files.start_try(folder, newest.number, Started(time=self.clock.time(), host="h", pid=1))
        self.jobs.states[newest.submission.key] = "over"


@pytest.fixture
def owed(tmp_path: Path) -> Owed:
    return Owed(tmp_path)


def test_a_request_is_submitted_once_and_never_after_its_result(owed: Owed) -> None:
    folder = owed.ask(4)
    assert owed.submit()[4].verdict == "submitted"
    assert owed.submit()[4].verdict == "in_flight"
    owed.end(folder)
    assert owed.submit(force=True)[4].verdict == "done"
    assert len(owed.jobs.orders) == 1


def test_a_final_one_that_is_killed_twice_comes_home_after_delays_that_double(owed: Owed) -> None:
    folder = owed.ask(4, "final")
    owed.submit()
    for delay_s in (600.0, 1200.0):
        owed.crash(folder)
        row = owed.submit()[4]
        assert (row.verdict, row.receipt.reason) == ("waits", "crashed")
        owed.clock.advance(delay_s - 1)
        assert owed.submit()[4].verdict == "waits"
        owed.clock.advance(1)
        assert owed.submit()[4].verdict == "submitted"
    owed.end(folder)
    assert owed.submit()[4].verdict == "done"
    assert [order.number for _, order in owed.jobs.orders] == [0, 1, 2]


def test_after_three_resubmissions_only_a_person_goes_on(owed: Owed) -> None:
    folder = owed.ask(4, "final")
    owed.submit()
    for _ in range(3):
        owed.crash(folder)
        owed.submit()
        owed.clock.advance(1e6)
        assert owed.submit()[4].verdict == "submitted"
    owed.crash(folder)
    owed.submit()
    owed.clock.advance(1e6)
    assert owed.submit()[4].verdict == "given_up"
    assert owed.submit(force=True)[4].verdict == "submitted"


def test_a_final_one_skipped_as_busy_before_it_was_the_last_comes_home_like_any_other(
    owed: Owed,
) -> None:
    for update in (2, 4):
        owed.ask(update)
    owed.submit()
    folder = owed.ask_at_the_end(8)
    assert owed.submit()[8].why == "2 are in flight"
    for update in (2, 4):
        owed.end(owed.root.evaluation(f"e1.u{update}", "held"))
    assert owed.submit()[8].verdict == "submitted"  # at once: nothing of it has failed yet
    for delay_s in (600.0, 1200.0, 2400.0):
        owed.crash(folder)
        assert owed.submit()[8].verdict == "waits"
        owed.clock.advance(delay_s)
        assert owed.submit()[8].verdict == "submitted"
    owed.crash(folder)
    owed.submit()
    owed.clock.advance(1e6)
    assert owed.submit()[8].verdict == "given_up"
    assert owed.submit(force=True)[8].verdict == "submitted"
    owed.end(folder)
    assert owed.submit()[8].verdict == "done"


def test_a_cadence_one_skipped_as_busy_stays_skipped(owed: Owed) -> None:
    folder = owed.ask(4)
    files.skip(folder, "busy", time=owed.clock.time())
    owed.clock.advance(1e6)
    for force in (False, True):
        assert owed.submit(force=force)[4].verdict in ("given_up", "reported")
    assert owed.jobs.orders == []


def test_the_same_failure_twice_stops_it_earlier(owed: Owed) -> None:
    folder = owed.ask(4, "final")
    error = TryError(error_class="E", fingerprint="f", message="m")
    for expected in ("submitted", "submitted", "given_up"):
        assert owed.submit()[4].verdict == expected
        if expected == "submitted":
            owed.end(folder, state="failed", error=error)
            owed.clock.advance(1e6)


@pytest.mark.parametrize("how", ["loses_answers", "loses_calls"])
def test_a_lost_call_or_answer_is_asked_again_under_the_same_key(owed: Owed, how: str) -> None:
    owed.ask(4, "final")
    setattr(owed.jobs, how, True)
    with pytest.raises(JobsAway):
        owed.submit()
    setattr(owed.jobs, how, False)
    expected = "in_flight" if how == "loses_answers" else "submitted"
    assert owed.submit()[4].verdict == expected
    assert len(owed.jobs.orders) == 1
    assert len(receipts.derive(owed.root.evaluation("e1.u4", "held"), stands=True).tries) == 1


def test_a_server_that_is_away_claims_nothing(owed: Owed) -> None:
    folder = owed.ask(4, "final")
    owed.jobs.is_away = True
    with pytest.raises(JobsAway):
        owed.submit()
    assert receipts.derive(folder, stands=True).state == "requested"


def test_two_are_in_flight_and_the_final_one_is_next(owed: Owed) -> None:
    folders = [owed.ask(update) for update in (2, 4, 6)]
    final = owed.ask(8, "final")
    verdicts = {update: row.verdict for update, row in owed.submit().items()}
    assert verdicts == {8: "submitted", 2: "submitted", 4: "waits", 6: "waits"}
    owed.end(final)
    assert owed.submit()[4].verdict == "submitted"
    owed.end(folders[0])
    owed.end(folders[1])
    assert owed.submit()[6].verdict == "submitted"


def test_a_missing_snapshot_is_reported_with_what_makes_a_new_one(owed: Owed) -> None:
    folder = owed.ask(4, "final")
    owed.submit()
    owed.end(folder, state="skipped", reason="snapshot_missing")
    owed.clock.advance(1e6)
    row = owed.submit()[4]
    assert row.verdict == "reported"
    assert f"milepost export {owed.root.path} --update 4" in row.why
    assert owed.submit(force=True)[4].verdict == "submitted"


def test_a_cadence_evaluation_that_failed_is_nobodys_debt(owed: Owed) -> None:
    folder = owed.ask(4)
    owed.submit()
    owed.crash(folder)
    owed.clock.advance(1e6)
    assert owed.submit()[4].verdict == "given_up"


def test_what_a_person_names_is_tried_again_owed_or_not_and_nothing_else(owed: Owed) -> None:
    failed, other = owed.ask(4), owed.ask(6, "final")
    owed.submit(asked=frozenset({failed}))
    error = TryError(error_class="E", fingerprint="f", message="m")
    for _ in range(6):  # past cap, delay and repetition
        owed.end(failed, state="failed", error=error)
        assert set(rows := owed.submit(asked=frozenset({failed}))) == {4}
        assert rows[4].verdict == "submitted"
        assert owed.submit(asked=frozenset({failed}))[4].verdict == "in_flight"
    owed.end(failed)
    assert owed.submit(asked=frozenset({failed}))[4].verdict == "done"
    assert receipts.derive(other, stands=True).state == "requested"


def test_a_lost_call_for_what_nobody_named_keeps_its_place_and_waits_for_its_own_pass(
    owed: Owed,
) -> None:
    named, lost = owed.ask(2), owed.ask(4, "final")
    owed.jobs.loses_calls = True
    with pytest.raises(JobsAway):
        owed.submit(asked=frozenset({lost}))
    owed.jobs.loses_calls = False
    assert owed.submit(asked=frozenset({named}))[2].verdict == "submitted"
    (order,) = [order for _, order in owed.jobs.orders]
    assert order.policy == "e1.u2"
    third = owed.ask(6)
    assert owed.submit(asked=frozenset({third}))[6].why == "2 are in flight"
    assert owed.submit()[4].verdict == "submitted"
    assert len(owed.jobs.orders) == 2


def test_what_a_person_names_waits_for_its_place_too(owed: Owed) -> None:
    named = owed.ask(2)
    for update in (4, 6):
        owed.ask(update, "final")
    owed.submit()
    row = owed.submit(asked=frozenset({named}))[2]
    assert (row.verdict, row.why) == ("waits", "2 are in flight")


def test_what_a_rewind_undid_is_voided(owed: Owed) -> None:
    owed.ask(4, "final")
    own(owed.root, epoch=2)  # restored nothing
    assert owed.submit()[4].verdict == "voided"
    assert owed.jobs.orders == []


def test_a_request_before_its_commit_waits(owed: Owed) -> None:
    folder = owed.root.evaluation("e1.u9", "held")
    files.write_request(folder, request_of(owed.ask(4)).model_copy(update={"policy": "e1.u9"}))
    assert owed.submit()[9].verdict == "waits"


def test_what_cannot_be_read_is_in_nothing_elses_way(owed: Owed) -> None:
    damaged, _ = owed.ask(2), owed.ask(4, "final")
    (damaged / "request.json").write_text("{")
    (owed.root.evaluations / "e1.u4-kept" / "held").mkdir(parents=True)
    (owed.root.evaluations / "e1.u4-kept" / "held" / "request.json").write_text("{}")
    rows = owed.submit()
    assert {update: row.verdict for update, row in rows.items()} == {2: "reported", 4: "submitted"}
    assert rows[2].receipt is None
    assert "move it aside and ask again" in rows[2].why
    records = Chain(owed.root).read()
    assert [receipt.update for _, receipt in receipts_of(owed.root, records)] == [4]


@pytest.mark.parametrize("torn", ["request.json", "submission.json", "started.json"])
def test_a_damaged_one_whose_job_may_run_keeps_its_place(owed: Owed, torn: str) -> None:
    damaged = owed.ask(2, "final")
    owed.submit()
    files.start_try(damaged, 0, Started(time=owed.clock.time(), host="h", pid=1))
    ((place,),) = [[*damaged.rglob(torn)]]
    place.write_text("{")
    owed.ask(4, "final")
    third = owed.ask(6, "final")
    rows = owed.submit()
    assert [rows[update].verdict for update in (2, 4, 6)] == ["reported", "submitted", "waits"]
    # What a person names alone is spoken of, and its place counts the same.
    assert set(rows := owed.submit(asked=frozenset({third}))) == {6}
    assert rows[6].why == "2 are in flight"
    files.finish_try(damaged, 0, Result(time=0.0, state="skipped", reason="crashed"))
    assert owed.submit()[6].verdict == "submitted"


def request_of(folder: Path) -> Request:
    found = receipts.derive(folder, stands=True)
    assert found is not None
    return found.request


@pytest.mark.parametrize("is_over", [False, True])
def test_a_shared_one_that_failed_runs_in_the_background_once_its_session_is_over(
    owed: Owed, is_over: bool
) -> None:
    folder = owed.ask(4, "final", mode="shared")
    files.claim_try(folder, by="session", time=owed.clock.time())
    if is_over:
        end_of(owed.root)
        assert owed.submit()[4].receipt.reason == "crashed"
        owed.clock.advance(600.0)
        assert owed.submit()[4].verdict == "submitted"
    else:
        assert owed.submit()[4].verdict == "in_flight"
        assert owed.jobs.orders == []


def end_of(root: RunRoot) -> None:
    chain = Chain(root)
    chain.read()
    chain.append(EndRecord(epoch=1, time=0.0, state="complete", ended_by="max_updates", update=4))


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
