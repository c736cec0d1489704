import hypothesis.strategies as st
import pytest
from hypothesis import given

from runtime.errors import EngineDead, Preempted, RetryBy, TransportError
from runtime.rundir.failure import Failure, choose_cause, fingerprint, normalise


@given(st.text(max_size=200))
def test_normal_form_is_its_own_normal_form(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e6))
def test_numbers_ids_and_paths_do_not_make_another_failure(rank: int, pid: int, s: float) -> None:
    def says(rank: int, pid: int, s: float) -> str:
        return (
            f"rank {rank} (pid {pid}, 0x{pid:x}) of e{rank}.u{pid} gone after {s:.3f} s: "
            f"/runs/a-{rank}/attempts/{pid}/session.log "
            f"550e8400-e29b-41d4-a716-44665544{pid % 9999:04d}"
        )

    assert fingerprint("A", "s", says(rank, pid, s)) == fingerprint("A", "s", says(1, 2, 3.0))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("A", "segment/5", "x"), ("B", "segment/5", "x")),
        (("A", "segment/5", "x"), ("A", "segment/6", "x")),
        (("A", "segment/5", "out of memory"), ("A", "segment/5", "connection lost")),
    ],
)
def test_class_step_and_words_make_another_failure(a, b) -> None:
    assert fingerprint(*a) != fingerprint(*b)


def test_a_failure_reads_back_with_what_an_operator_needs() -> None:
    error = EngineDead("engine 2 died", engine=2, where=object)
    failure = Failure.of(error, step="segment/5", time=1.0)
    assert Failure.model_validate_json(failure.model_dump_json()) == failure
    assert failure.retry is RetryBy.SESSION
    assert failure.next_check == EngineDead.next_check
    assert failure.detail == {"engine": 2, "where": repr(object)}


def test_an_unknown_exception_is_retried_by_nobody() -> None:
    failure = Failure.of(KeyError("x"), step="segment/5", time=1.0)
    assert (failure.error_class, failure.retry) == ("KeyError", RetryBy.NOBODY)
    assert Failure.of(RuntimeError(), step="s", time=0.0).message == "RuntimeError"


def test_two_occurrences_have_two_ids() -> None:
    a, b = (Failure.of(EngineDead("x"), step="s", time=0.0) for _ in range(2))
    assert a.id != b.id
    assert a.fingerprint == b.fingerprint


@given(st.permutations(["death", "exception", "connection"]))
def test_the_cause_is_the_death_however_late_it_was_heard_of(order: list[str]) -> None:
    failures = [
        Failure.of(EngineDead(kind), step="s", time=float(i), kind=kind)
        for i, kind in enumerate(order)
    ]
    cause = choose_cause(failures)
    assert cause.message == "death"
    assert len(cause.attached) == 2


def test_among_equals_the_first_is_the_cause() -> None:
    failures = [Failure.of(EngineDead(str(t)), step="s", time=t) for t in (3.0, 1.0, 2.0)]
    assert choose_cause(failures).message == "1.0"


@pytest.mark.parametrize(
    ("error", "is_exempt"),
    [(Preempted("x"), True), (TransportError("x"), True), (EngineDead("x"), False)],
)
def test_what_says_nothing_about_the_run_is_not_counted(error: Exception, is_exempt) -> None:
    assert Failure.of(error, step="s", time=0.0).is_exempt is is_exempt
