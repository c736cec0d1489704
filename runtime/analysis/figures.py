"""Charts of the report as plain data: Plotly traces whose colours are names of CSS variables.

Pure functions from rows to ``Chart``. A chart without data keeps its place and says what is
missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from runtime.analysis.runfiles import Point, Row, mapping, number

MAX_POINTS = 2000
"""Longer series are shown as means of equal stretches."""

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One card of the report."""

    id: str
    title: str
    caption: str
    """How to read it, in a sentence or two."""
    traces: list[Trace] = field(default_factory=list[Trace])
    layout: Trace = field(default_factory=dict[str, Any])
    wide: bool = False
    """Takes the whole width."""
    empty: str = "nothing recorded yet"
    """What stands there without traces."""


def lines(points: Sequence[Point], named: dict[str, str], *, x_name: str) -> list[Trace]:
    """A line per metric: the current history in colour, superseded stretches in grey.

    Args:
        points: rows of one axis, ascending.
        named: metric key to what the legend calls it; keys that no row has are left out.
        x_name: word for the step in the hover text.
    """
    traces: list[Trace] = []
    for key, label in named.items():  # first, so that the current history lies on top
        traces += _superseded(points, key, label, x_name)
    for i, (key, label) in enumerate(named.items()):
        current = [
            (p.step, p.values[key]) for p in points if key in p.values and not p.is_superseded
        ]
        if current:
            xs, ys = thin(current)
            traces.append(_line(xs, ys, label, f"--series-{i + 1}", x_name))
    return traces


def _superseded(points: Sequence[Point], key: str, label: str, x_name: str) -> list[Trace]:
    by_epoch: dict[int, list[tuple[float, float]]] = {}
    for p in points:
        if p.is_superseded and key in p.values:
            by_epoch.setdefault(p.epoch, []).append((p.step, p.values[key]))
    traces: list[Trace] = []
    for epoch, pairs in sorted(by_epoch.items()):
        xs, ys = thin(pairs)
        trace = _line(xs, ys, f"{label}, epoch {epoch} (superseded)", "--superseded", x_name)
        trace["line"]["dash"] = "dot"
        trace["showlegend"] = False
        traces.append(trace)
    return traces


def _line(xs: list[float], ys: list[float | None], label: str, color: str, x_name: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": xs,
        "y": ys,
        "name": label,
        "line": {"color": color, "width": 1.7},
        "marker": {"color": color, "size": 6},
        "hovertemplate": f"{x_name} %{{x}}<br>{label} %{{y:.4g}}<extra></extra>",
    }


def reward(points: Sequence[Point]) -> Chart:
    """Mean reward per collection, faint, with its running mean over ten, strong."""
    traces = lines(points, {"rollout/reward_mean": "mean reward"}, x_name="collection")
    pairs = [
        (p.step, p.values["rollout/reward_mean"])
        for p in points
        if not p.is_superseded and "rollout/reward_mean" in p.values
    ]
    if len(pairs) >= 10:
        traces[-1]["line"] = {"color": "--series-1-soft", "width": 1.5}
        smooth = [
            (step, sum(v for _, v in pairs[max(0, i - 9) : i + 1]) / min(i + 1, 10))
            for i, (step, _) in enumerate(pairs)
        ]
        xs, ys = thin(smooth)
        traces.append(_line(xs, ys, "mean of the last 10", "--series-1", "collection"))
        traces[-1]["line"]["width"] = 2.5
    return Chart(
        id="reward",
        title="Reward",
        caption="Mean over all samples of a collection. Grey, dotted: superseded by a later epoch.",
        traces=traces,
        layout=_axes("collection", "reward"),
        wide=True,
    )


def staleness(points: Sequence[Point]) -> Chart:
    """Mean and largest staleness per collection."""
    named = {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"}
    return Chart(
        id="staleness",
        title="Staleness",
        caption="Trainer's update when the collection is taken, minus the group's oldest update.",
        traces=lines(points, named, x_name="collection"),
        layout=_axes("collection", "updates"),
    )


def staleness_histogram(points: Sequence[Point]) -> Chart:
    """How many collections had which largest staleness."""
    counts: dict[float, int] = {}
    for p in points:
        if not p.is_superseded and "rollout/staleness_max" in p.values:
            value = p.values["rollout/staleness_max"]
            counts[value] = counts.get(value, 0) + 1
    keys = sorted(counts)
    layout = _axes("largest staleness in the collection", "collections")
    layout["xaxis"]["dtick"] = 1 if len(keys) <= 20 else None
    layout["bargap"] = 0.15
    trace: Trace = {
        "type": "bar",
        "x": keys,
        "y": [counts[k] for k in keys],
        "marker": {"color": "--series-1"},
        "hovertemplate": "staleness %{x}: %{y} collections<extra></extra>",
    }
    return Chart(
        id="staleness-histogram",
        title="Staleness, how often",
        caption="Collections of the current history by their stalest group.",
        traces=[trace] if keys else [],
        layout=layout,
    )


def simple(
    id_: str,
    title: str,
    caption: str,
    points: Sequence[Point],
    named: dict[str, str],
    *,
    x: str,
    y: str,
    log_y: bool = False,
) -> Chart:
    """A line chart of some metrics of one axis."""
    layout = _axes(x, y)
    if log_y:
        layout["yaxis"]["type"] = "log"
    return Chart(
        id=id_, title=title, caption=caption, traces=lines(points, named, x_name=x), layout=layout
    )


def agreement(points: Sequence[Point], limit: float | None) -> Chart:
    """Log-prob gap between trainer and engine at equal weights, with its limit."""
    named = {"train/agreement/gap_mean": "mean", "train/agreement/gap_p99": "p99"}
    traces = lines(points, named, x_name="update")
    layout = _axes("update", "gap (nats)")
    positive = [v for t in traces for v in t["y"] if v is not None and v > 0]
    if positive:
        layout["yaxis"]["type"] = "log"
        layout["yaxis"]["exponentformat"] = "power"
    if traces and limit is not None and limit > 0:
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"color": "--critical", "width": 1.5, "dash": "dash"},
            }
        ]
        layout["annotations"] = [_label(f"limit of the mean {limit:g}", limit, bool(positive))]
    return Chart(
        id="agreement",
        title="Agreement of trainer and engine",
        caption="Mean absolute gap of log-probs at equal weights; the limit guards the mean only.",
        traces=traces,
        layout=layout,
        empty="not measured yet",
    )


def evaluation(points: Sequence[Point]) -> Chart:
    """Mean of each set with its bootstrap interval."""
    sets = sorted({key.split("/")[1] for p in points for key in p.values if key.count("/") >= 2})
    traces: list[Trace] = []
    for i, name in enumerate(sets):
        mean = f"evaluation/{name}/mean"
        for is_superseded in (False, True):
            rows = [p for p in points if mean in p.values and p.is_superseded == is_superseded]
            if not rows:
                continue
            color = "--superseded" if is_superseded else f"--series-{i % 8 + 1}"
            trace = _line(
                [p.step for p in rows], [p.values[mean] for p in rows], name, color, "update"
            )
            trace["mode"] = "markers" if is_superseded else "lines+markers"
            trace["showlegend"] = not is_superseded
            if all(f"{mean}_low" in p.values and f"{mean}_high" in p.values for p in rows):
                trace["error_y"] = _interval(rows, mean, color)
            traces.append(trace)
    return Chart(
        id="evaluation",
        title="Evaluation",
        caption="Mean per set, with the bootstrap interval over prompts.",
        traces=traces,
        layout=_axes("update", "mean"),
        empty="no evaluation has a result yet",
    )


def _interval(rows: Sequence[Point], mean: str, color: str) -> Trace:
    return {
        "type": "data",
        "symmetric": False,
        "array": [p.values[f"{mean}_high"] - p.values[mean] for p in rows],
        "arrayminus": [p.values[mean] - p.values[f"{mean}_low"] for p in rows],
        "color": color,
        "thickness": 1,
        "width": 3,
    }


def errors(points: Sequence[Point]) -> Chart:
    """Failed and requeued group attempts by class, over wall time; counts belong to a process."""
    named = {
        "errors/transport_groups": "transport",
        "errors/overload_groups": "overload",
        "errors/unavailable_groups": "unavailable",
        "errors/timeout_groups": "timeout",
    }
    traces: list[Trace] = []
    for i, (key, label) in enumerate(named.items()):
        rows = [p for p in points if key in p.values]
        if not any(p.values[key] for p in rows):
            continue
        xs: list[str | None] = []
        ys: list[float | None] = []
        for before, p in zip([None, *rows], rows, strict=False):
            if before is not None and before.epoch != p.epoch:
                xs.append(None)
                ys.append(None)
            xs.append(_clock(p.time))
            ys.append(p.values[key])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": xs,
                "y": ys,
                "name": label,
                "line": {"color": f"--series-{i + 1}", "width": 2, "shape": "hv"},
                "hovertemplate": f"{label} %{{y}}<br>%{{x}}<extra></extra>",
            }
        )
    attempts = max((p.values.get("errors/completed_group_attempts", 0) for p in points), default=0)
    layout = _axes(None, "group attempts")
    layout["xaxis"]["type"] = "date"
    return Chart(
        id="errors",
        title="Serving errors",
        caption="Group attempts that failed and were requeued so far, by class, per process.",
        traces=traces,
        layout=layout,
        wide=True,
        empty=f"none in {attempts:,.0f} group attempts" if points else "nothing recorded yet",
    )


def occupancy(rows: Sequence[Row]) -> list[Chart]:
    """Sampled values over time: counts in one chart, shares (0..1) in another."""
    series: dict[str, list[tuple[float, float]]] = {}
    gaps: list[float] = []
    last: float | None = None
    for row in rows:
        at, interval = number(row, "time"), number(row, "interval_s") or 1.0
        values = mapping(row, "values")
        if at is None:
            continue
        if last is not None and at - last > 2.5 * interval:
            gaps.append((last + at) / 2)
        last = at
        for key in values:
            value = number(values, key)
            if value is not None:
                series.setdefault(key, []).append((at, value))
    shares = {k for k in series if k.endswith(("_share", "_usage", "_fraction"))}
    counts = [k for k in series if k not in shares and any(pair[1] for pair in series[k])]
    charts = [
        Chart(
            id="occupancy",
            title="Occupancy of the pipeline",
            caption="Sampled counts. A break in a line is missing coverage, not zero.",
            traces=[_over_time(k, series[k], gaps, i) for i, k in enumerate(sorted(counts)[:8])],
            layout=_time_axes("count"),
            wide=True,
        )
    ]
    if shares:
        charts.append(
            Chart(
                id="occupancy-shares",
                title="Occupancy, shares",
                caption="Sampled shares, 0 to 1.",
                traces=[
                    _over_time(k, series[k], gaps, i) for i, k in enumerate(sorted(shares)[:8])
                ],
                layout=_time_axes("share"),
            )
        )
    return charts


def _over_time(name: str, pairs: list[tuple[float, float]], gaps: Sequence[float], i: int) -> Trace:
    xs, ys = thin(pairs)
    marked: list[tuple[float, float | None]] = sorted(
        [*zip(xs, ys, strict=True), *((gap, None) for gap in gaps)], key=lambda pair: pair[0]
    )
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [_clock(at) for at, _ in marked],
        "y": [value for _, value in marked],
        "name": name.replace("_", " "),
        "connectgaps": False,
        "line": {"color": f"--series-{i + 1}", "width": 1.5},
        "hovertemplate": f"{name} %{{y:.4g}}<br>%{{x}}<extra></extra>",
    }


def thin(pairs: Iterable[tuple[float, float]]) -> tuple[list[float], list[float | None]]:
    """At most ``MAX_POINTS`` points: longer series as means of equally long stretches, in order."""
    items = list(pairs)
    if len(items) <= MAX_POINTS:
        return [x for x, _ in items], [y for _, y in items]
    size = -(-len(items) // MAX_POINTS)
    xs: list[float] = []
    ys: list[float | None] = []
    for at in range(0, len(items), size):
        part = items[at : at + size]
        xs.append(part[len(part) // 2][0])
        ys.append(sum(y for _, y in part) / len(part))
    return xs, ys


def _axes(x: str | None, y: str) -> Trace:
    return {"xaxis": {"title": {"text": x or ""}}, "yaxis": {"title": {"text": y}}}


def _time_axes(y: str) -> Trace:
    layout = _axes(None, y)
    layout["xaxis"]["type"] = "date"
    return layout


def _label(text: str, y: float, is_log: bool) -> Trace:
    return {
        "text": text,
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": math.log10(y) if is_log else y,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "--critical", "size": 11},
    }


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
