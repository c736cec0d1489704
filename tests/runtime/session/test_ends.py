import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.session.ends import End, EndedBy, EndRules


def rules(**changed: object) -> EndRules:
    fields: dict[str, object] = {
        "max_updates": None,
        "data_updates": 100,
        "max_run_seconds": None,
        "debug_exit_after": None,
        "first_update": 0,
        **changed,
    }
    return EndRules(**fields)  # type: ignore[arg-type]


def by(end: End | None) -> EndedBy | None:
    return None if end is None else end.by


@pytest.mark.parametrize(
    ("changed", "update", "age_s", "expected"),
    [
        ({"max_updates": 8}, 7, 0, None),
        ({"max_updates": 8}, 8, 0, EndedBy.MAX_UPDATES),
        ({"max_updates": 8}, 9, 0, EndedBy.MAX_UPDATES),
        ({"max_updates": 8, "debug_exit_after": 8}, 8, 0, EndedBy.MAX_UPDATES),
        ({"max_updates": 8, "debug_exit_after": 3}, 3, 0, EndedBy.DEBUG_EXIT),
        ({"debug_exit_after": 3, "first_update": 6}, 8, 0, None),
        ({"debug_exit_after": 3, "first_update": 6}, 9, 0, EndedBy.DEBUG_EXIT),
        ({"max_run_seconds": 60.0}, 3, 59.9, None),
        ({"max_run_seconds": 60.0}, 3, 60.0, EndedBy.WALL_CLOCK),
        ({"max_run_seconds": 60.0, "debug_exit_after": 3}, 3, 60.0, EndedBy.WALL_CLOCK),
        ({"max_updates": 3, "max_run_seconds": 60.0}, 3, 60.0, EndedBy.MAX_UPDATES),
        ({"data_updates": 5}, 5, 0, EndedBy.DATA),
        ({"data_updates": 5, "max_updates": 5}, 5, 0, EndedBy.MAX_UPDATES),
        ({"data_updates": 5, "max_updates": 9}, 5, 0, EndedBy.DATA),
        ({"data_updates": 5, "debug_exit_after": 5, "max_run_seconds": 0.0}, 5, 1, EndedBy.DATA),
    ],
)
def test_the_end_that_is_due(
    changed: dict[str, object], update: int, age_s: float, expected: EndedBy | None
) -> None:
    assert by(rules(**changed).after(update, age_s=age_s)) is expected


@pytest.mark.parametrize("end", list(EndedBy))
def test_only_a_run_that_is_over_owes_export_and_final_evaluation(end: EndedBy) -> None:
    is_over = end in {EndedBy.MAX_UPDATES, EndedBy.DATA, EndedBy.WALL_CLOCK, EndedBy.STOP_FINAL}
    asked = End(by=end)
    assert (asked.is_complete, asked.owes_export, asked.owes_evaluation) == (is_over,) * 3
    assert asked.activity == ("parked" if end is EndedBy.PARKED else "stopped")


@given(
    max_updates=st.none() | st.integers(1, 50),
    data_updates=st.integers(1, 50),
    debug_exit_after=st.none() | st.integers(1, 50),
    first_update=st.integers(0, 50),
    step=st.integers(1, 4),
)
def test_going_on_boundary_by_boundary_always_ends_and_never_late(
    max_updates: int | None,
    data_updates: int,
    debug_exit_after: int | None,
    first_update: int,
    step: int,
) -> None:
    ends = rules(
        max_updates=max_updates,
        data_updates=data_updates,
        debug_exit_after=debug_exit_after,
        first_update=first_update,
    )
    update = first_update
    while ends.after(update, age_s=0.0) is None:
        update += step
    bound = min(
        data_updates,
        max_updates or math.inf,
        first_update + debug_exit_after if debug_exit_after else math.inf,
    )
    assert update < max(bound, first_update) + step
    reached = ends.reached(update)
    assert reached is None or reached == ends.after(update, age_s=math.inf)
