import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.analysis.figures import MAX_POINTS, thin
from runtime.analysis.lanes import fold_gaps, lanes, stage_table
from runtime.analysis.runfiles import History


def row(name: str, update: int | None, duration_s: float, **more: object) -> dict[str, object]:
    return {
        "name": name,
        "cost": "optimisation",
        "update": update,
        "epoch": 1,
        "start": 0.0,
        "duration_s": duration_s,
        "cold": False,
        **more,
    }


def test_cold_runs_and_superseded_ones_stay_out_of_the_warm_figures() -> None:
    rows = [
        row("train", 1, 9.0, cold=True),
        row("train", 2, 1.0),
        row("train", 3, 50.0),
        row("train", 3, 3.0, epoch=2),
        row("restore", None, 4.0, cold=True),
    ]
    train, restore = sorted(stage_table(rows, History()), key=lambda r: r.name, reverse=True)
    assert (train.num_warm, train.num_cold) == (2, 1)
    assert (train.warm_median_s, train.warm_max_s, train.cold_max_s) == (2.0, 3.0, 9.0)
    assert (restore.num_warm, restore.warm_median_s, restore.cold_max_s) == (0, None, 4.0)


def test_lanes_show_the_newest_updates_only() -> None:
    rows = [row("train", u, 1.0, start=float(u)) for u in range(1, 101)]
    chart = lanes(rows, History(), updates=10)
    (trace,) = chart.traces
    assert [pair[0] for pair in trace["customdata"]] == [str(u) for u in range(91, 101)]
    assert trace["base"][0] == 0.0


@given(st.lists(st.floats(-1e6, 1e6), max_size=3 * MAX_POINTS + 5).map(lambda v: v * 1))
def test_thinning_keeps_short_series_and_the_mean_of_long_ones(values: list[float]) -> None:
    xs, ys = thin(list(enumerate(values)))
    assert len(xs) == len(ys) <= MAX_POINTS
    assert xs == sorted(xs)
    if len(values) <= MAX_POINTS:
        assert ys == values


def test_thinned_values_are_means_of_equal_stretches() -> None:
    count = 4 * MAX_POINTS
    _, ys = thin([(float(i), float(i % 4)) for i in range(count)])
    assert len(ys) == MAX_POINTS
    assert set(ys) == {1.5}


spans = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 20)).map(lambda s: (float(s[0]), float(sum(s)))),
    min_size=1,
    max_size=12,
)


@given(spans)
def test_folding_keeps_order_and_lengths_and_bounds_idle_time(
    busy: list[tuple[float, float]],
) -> None:
    place, folds = fold_gaps(busy, share=0.1)
    for begin, end in busy:
        assert place(end - 1e-6) - place(begin) == pytest.approx(end - begin, abs=1e-5)
    moments = sorted(begin for begin, _ in busy)
    assert place(moments[0]) == 0.0
    assert [place(m) for m in moments] == sorted(place(m) for m in moments)
    total = sum(end - begin for begin, end in busy)
    last = max(place(begin) + end - begin for begin, end in busy)
    assert last <= total * (1 + 0.1 * (len(busy) - 1)) + 1e-6
    assert all(gap > 0.0 for _, gap in folds)


def test_hours_between_attempts_do_not_squash_the_lanes() -> None:
    rows = [row("train", u, 1.0, start=u + (0.0 if u < 6 else 36_000.0)) for u in range(1, 11)]
    chart = lanes(rows, History())
    assert max(chart.traces[0]["base"]) < 12
    assert [note["text"] for note in chart.layout["annotations"]] == ["idle 36,000 s"]
