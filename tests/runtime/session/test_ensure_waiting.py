"""The owner's life and the caller's patience, with a clock that is told."""

import threading

import pytest

from runtime.errors import WaitTimeout
from runtime.rundir import atomic, workflow
from runtime.rundir.control import Control
from runtime.session.answers import Done, Lost, Running
from runtime.session.ensure import Onlooker, ensure
from runtime.session.steps import Step
from tests.runtime.session.written_run import ELSEWHERE, LEASE_S, Run


def test_a_dead_guard_of_this_host_is_lost_at_once(run: Run) -> None:
    run.begin()
    newest = run.chain.seen[-1]
    assert isinstance(run.ask("segment/5"), Running)
    atomic.write_bytes(
        run.root.chain / "0.json",
        newest.model_copy(update={"started": newest.started - 1}).model_dump_json().encode(),
    )
    run.onlooker = Onlooker(run.root, clock=run.clock, sleep=run.sleep)
    assert isinstance(run.ask("segment/5"), Lost)


def test_an_owner_elsewhere_is_lost_after_a_whole_lease_and_two_looks(run: Run) -> None:
    run.begin(here=ELSEWHERE)
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S - 1)
    assert isinstance(run.ask("segment/5"), Running)
    run.refresh()
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S + 1)
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(LEASE_S / 10)
    answer = run.ask("segment/5")
    assert isinstance(answer, Lost)
    assert "has not refreshed its lease" in answer.reason


def test_a_looker_that_slept_takes_nobody_for_dead(run: Run) -> None:
    run.begin(here=ELSEWHERE)
    run.ask("segment/5")
    run.clock.advance(10 * LEASE_S)
    run.refresh()
    assert isinstance(run.ask("segment/5"), Running)
    run.clock.advance(10 * LEASE_S)
    assert isinstance(run.ask("segment/5"), Running)


def test_a_silent_session_of_a_living_guard_is_stale_on_two_looks(run: Run) -> None:
    run.begin()
    run.view(state="training", activity="running")
    assert not run.ask("segment/5").is_stale
    run.clock.advance(20)
    run.refresh()
    assert not run.ask("segment/5").is_stale
    run.clock.advance(20)
    run.refresh()
    assert run.ask("segment/5").is_stale
    run.beat(2)
    assert not run.ask("segment/5").is_stale


def test_a_damaged_view_hides_nothing_that_the_chain_knows(run: Run) -> None:
    run.begin()
    run.commit(0)
    run.commit(5)
    run.root.workflow.write_text('{"state": "compl')
    assert run.ask("checkpoint/5").receipt.update == 5
    assert isinstance(run.ask("checkpoint/6"), Running)
    view = workflow.current(run.root, run.chain.seen, now=0.0)
    assert (view.state, view.update, view.last_checkpoint) == ("training", 5, 5)


def test_a_call_polls_until_its_timeout_and_every_poll_attaches(run: Run) -> None:
    run.begin()
    control = Control(run.root)
    assert control.attached() is None
    answer = run.onlooker.ensure(Step.parse("segment/5"), timeout_s=20, poll_s=0.5)
    assert isinstance(answer, Running)
    assert run.slept == [0.5] * 40
    assert control.attached() is not None


def test_the_deadline_counts_from_the_last_progress_of_any_kind(run: Run) -> None:
    run.begin()
    step = Step.parse("checkpoint/5")
    for update in range(1, 4):
        run.view(update=update, state="training")
        run.refresh()
        run.onlooker.look(step)
        run.clock.advance(25)
        run.refresh()
        run.onlooker.look(step)
        run.clock.advance(25)
        answer = run.onlooker.ensure(step, timeout_s=0, deadline_s=60)
        assert answer.idle_s == 50
    run.refresh()
    run.clock.advance(11)
    with pytest.raises(WaitTimeout, match="checkpoint/5: nothing moved for 61 s"):
        run.onlooker.ensure(step, timeout_s=0, deadline_s=60)


def test_a_step_done_while_waiting_is_answered_at_the_next_poll(run: Run) -> None:
    run.begin()
    run.onlooker = Onlooker(run.root, clock=run.clock, sleep=lambda _: run.commit(5))
    assert isinstance(run.onlooker.ensure(Step.parse("checkpoint/5")), Done)


def test_many_callers_get_the_same_answer(run: Run) -> None:
    run.begin()
    run.commit(5)
    answers: list[object] = []

    def call() -> None:
        answers.append(ensure(run.root, "checkpoint/5", timeout_s=0))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(a == answers[0] for a in answers)
