"""Which tries follow one that failed, when, and which never."""

import pytest

from runtime.evaluation import files
from runtime.evaluation.records import TryError
from tests.runtime.evaluation.owed import Owed, end_of


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
