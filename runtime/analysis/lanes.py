"""Stage times: lanes of the newest updates, and a table that keeps cold and warm apart."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from runtime.analysis.figures import Chart, Trace
from runtime.analysis.runfiles import History, Row, current_rows, number

SHOWN_UPDATES = 24
_COLORS = {
    "rollout": "--series-1",
    "optimisation": "--series-2",
    "publication": "--series-3",
    "scoring": "--series-4",
    "checkpoint": "--series-5",
    "evaluation": "--series-8",
    "orchestration": "--muted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage's times over the run; seconds. None where there is no such run of it."""

    name: str
    cost: str
    num_warm: int
    num_cold: int
    warm_median_s: float | None
    warm_p90_s: float | None
    warm_max_s: float | None
    cold_max_s: float | None


def lanes(rows: Sequence[Row], history: History, *, updates: int = SHOWN_UPDATES) -> Chart:
    """A lane per stage over the newest updates; hatched where cold, grey where superseded."""
    numbered = [u for row in rows if (u := number(row, "update")) is not None]
    last = max(numbered, default=None)
    shown = [row for row in rows if _belongs(row, last, updates)]
    place, folds = fold_gaps([(row_start(row), row_end(row)) for row in shown])
    is_current = current_rows(rows, history)
    names = list(dict.fromkeys(_name(row) for row in shown))
    current = [row for row in shown if is_current(row)]
    traces = [
        _bars(part, place, cost, color)
        for cost, color in _COLORS.items()
        if (part := [row for row in current if str(row.get("cost", "orchestration")) == cost])
    ]
    if superseded := [row for row in shown if not is_current(row)]:
        traces.append(_bars(superseded, place, "superseded", "--superseded"))
    return Chart(
        id="lanes",
        title=f"Timing of the last {min(updates, len(set(numbered)))} updates",
        caption=(
            "Stages overlap, so their durations do not add up to wall time. Hatched: a cold run "
            "(compile, restore, first call)."
        ),
        traces=traces,
        layout={
            "xaxis": {
                "title": {"text": "seconds since the first stage shown, long idle times folded"}
            },
            "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": names},
            "barmode": "overlay",
            "bargap": 0.35,
            "hovermode": "closest",
            "shapes": [_fold_line(x) for x, _ in folds],
            "annotations": [_fold_label(x, gap_s) for x, gap_s in folds],
        },
        wide=True,
    )


def fold_gaps(
    spans: Sequence[tuple[float, float]], *, share: float = 0.06
) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Put stretches of time side by side, with idle hours between attempts folded.

    Args:
        spans: (begin, end) in wall seconds, in any order.
        share: a gap longer than this share of the busy time is drawn that long.

    Returns:
        The place of a moment, in seconds from the first; and per fold its place and the gap's true
        length. Within a stretch seconds stay seconds.
    """
    stretches: list[list[float]] = []
    for begin, end in sorted(spans):
        if stretches and begin <= stretches[-1][1]:
            stretches[-1][1] = max(stretches[-1][1], end)
        else:
            stretches.append([begin, end])
    cap_s = share * sum(end - begin for begin, end in stretches)
    places: list[float] = []
    folds: list[tuple[float, float]] = []
    at = 0.0
    for i, (begin, end) in enumerate(stretches):
        if i:
            gap_s = begin - stretches[i - 1][1]
            if gap_s > cap_s:
                folds.append((at + cap_s / 2, gap_s))
            at += min(gap_s, cap_s)
        places.append(at)
        at += end - begin
    begins = [begin for begin, _ in stretches]

    def place(moment: float) -> float:
        i = max(0, bisect_right(begins, moment) - 1)
        return places[i] + moment - begins[i] if begins else 0.0

    return place, folds


def row_start(row: Row) -> float:
    """Wall seconds when the stage began; 0 where the row does not say."""
    return number(row, "start") or 0.0


def row_end(row: Row) -> float:
    """Wall seconds when it ended."""
    return row_start(row) + max(0.0, number(row, "duration_s") or 0.0)


def _fold_line(x: float) -> Trace:
    line = {"color": "--muted", "width": 1, "dash": "dot"}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line}


def _fold_label(x: float, gap_s: float) -> Trace:
    return {
        "text": f"idle {gap_s:,.0f} s",
        "x": x,
        "xanchor": "right",
        "yref": "paper",
        "y": 1,
        "yanchor": "top",
        "textangle": -90,
        "showarrow": False,
        "font": {"color": "--muted", "size": 11},
    }


def _belongs(row: Row, last: float | None, updates: int) -> bool:
    update = number(row, "update")
    if number(row, "start") is None or number(row, "duration_s") is None:
        return False
    if last is None:
        return True
    return update is not None and update > last - updates


def _bars(rows: Sequence[Row], place: Callable[[float], float], name: str, color: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [_name(row) for row in rows],
        "base": [round(place(row_start(row)), 4) for row in rows],
        "x": [round(number(row, "duration_s") or 0.0, 4) for row in rows],
        "customdata": [[_update(row), _temperature(row)] for row in rows],
        "marker": {
            "color": color,
            "line": {"width": 0},
            "pattern": {
                "shape": ["/" if row.get("cold") else "" for row in rows],
                "bgcolor": color,  # left out, a hatched bar has no body
                "fgcolor": "--surface",
                "size": 6,
                "solidity": 0.25,
            },
        },
        "hovertemplate": (
            "%{y}, update %{customdata[0]}, %{customdata[1]}<br>%{x:.3f} s<extra></extra>"
        ),
    }


def _name(row: Row) -> str:
    return str(row.get("name")).replace("_", " ")


def _update(row: Row) -> str:
    update = number(row, "update")
    return "-" if update is None else str(int(update))


def _temperature(row: Row) -> str:
    return "cold" if row.get("cold") else "warm"


def stage_table(rows: Sequence[Row], history: History) -> list[StageRow]:
    """Times per stage of the current history, longest warm median first."""
    is_current = current_rows(rows, history)
    found: dict[str, dict[bool, list[float]]] = {}
    costs: dict[str, str] = {}
    for row in rows:
        duration = number(row, "duration_s")
        if duration is None or not is_current(row):
            continue
        name = _name(row)
        costs[name] = str(row.get("cost", ""))
        found.setdefault(name, {True: [], False: []})[bool(row.get("cold"))].append(duration)
    table = [_stage_row(name, costs[name], times) for name, times in found.items()]
    return sorted(table, key=lambda r: -(r.warm_median_s or r.cold_max_s or 0.0))


def _stage_row(name: str, cost: str, times: Mapping[bool, Sequence[float]]) -> StageRow:
    warm, cold = sorted(times[False]), times[True]
    return StageRow(
        name=name,
        cost=cost,
        num_warm=len(warm),
        num_cold=len(cold),
        warm_median_s=median(warm) if warm else None,
        warm_p90_s=warm[min(len(warm) - 1, int(0.9 * len(warm)))] if warm else None,
        warm_max_s=warm[-1] if warm else None,
        cold_max_s=max(cold) if cold else None,
    )
