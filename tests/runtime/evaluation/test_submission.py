"""What is submitted, and when: receipts, a store of jobs, and a clock."""

import pytest

from runtime.evaluation import files, receipts
from runtime.evaluation.reading import receipts_of
from runtime.evaluation.records import Result, Started, TryError
from runtime.evaluation.submission import JobsAway
from runtime.rundir.chain import Chain
from tests.runtime.evaluation.owed import Owed, request_of
from tests.runtime.session.attempted import own


def test_a_request_is_submitted_once_and_never_after_its_result(owed: Owed) -> None:
    folder = owed.ask(4)
    assert owed.submit()[4].verdict == "submitted"
    assert owed.submit()[4].verdict == "in_flight"
    owed.end(folder)
    assert owed.submit(force=True)[4].verdict == "done"
    assert len(owed.jobs.orders) == 1


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
