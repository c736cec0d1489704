"""One HTML page about a run: everything inside it, nothing fetched.

Works on runs that are unfinished or damaged: what cannot be read is named on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from runtime.analysis import figures, lanes
from runtime.analysis.figures import Chart
from runtime.analysis.runfiles import Point, Row, RunFiles, mapping, number
from runtime.rundir import atomic

MAX_TABLE_ROWS = 200
"""Collections shown in the table, newest first; the files have them all."""


def write_report(root: Path) -> Path:
    """Write ``reports/report.html`` of the run at ``root`` and return its path.

    Replaces an older report in one step; touches nothing else. Any state of the run will do.

    Raises:
        NotADirectoryError: if there is no such root.
        OSError: if the page cannot be written.
    """
    if not root.is_dir():
        raise NotADirectoryError(f"no output root at {root}: give a run's root, or its name")
    page = render(root, written_at=time.time())
    target = root / "reports" / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(target, page.encode())
    return target


def render(root: Path, *, written_at: float) -> str:
    """The page as text; ``written_at`` in wall seconds."""
    run = RunFiles(root)
    workflow = run.document("workflow.json") or {}
    plan = run.document("plan.json") or {}
    train, rollout = run.points("train/update"), run.points("rollout/collection")
    evaluations = run.points("evaluation/update")
    timing = run.rows("driver_timing.jsonl").rows
    sections = [
        ("Learning", learning_charts(run, train, rollout, evaluations)),
        ("Rollouts", rollout_charts(rollout)),
        ("Time", time_charts(run, train, timing)),
        ("Trouble", [figures.errors(run.points("errors/elapsed_seconds"))]),
    ]
    stages = lanes.stage_table(timing, run.history())
    template = Environment(
        loader=PackageLoader("runtime.analysis"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html.j2")
    return template.render(
        name=_name(workflow, plan, root),
        workflow=workflow,
        facts=facts(workflow, plan, written_at),
        tiles=tiles(workflow, train, rollout, evaluations),
        evidence=evidence(workflow),
        outstanding=[str(item) for item in _list(workflow.get("outstanding"))],
        failure=mapping(workflow, "failure"),
        sections=[(title, charts) for title, charts in sections],
        stages=stages,
        collections=collection_table(rollout),
        num_collections=len(rollout),
        metrics=latest_metrics(train, rollout),
        notes=run.notes,
        data=_inline_json({c.id: asdict(c) for _, charts in sections for c in charts}),
        plotly=Markup((files("plotly") / "package_data" / "plotly.min.js").read_text()),
    )


def learning_charts(
    run: RunFiles,
    train: Sequence[Point],
    rollout: Sequence[Point],
    evaluations: Sequence[Point],
) -> list[Chart]:
    """Reward, evaluation and what the optimizer did."""
    charts = [
        figures.reward(rollout),
        figures.evaluation(evaluations),
        figures.agreement(train, _gap_limit(run)),
        figures.simple(
            "loss",
            "Loss",
            "A policy loss of 0 is no alarm: centred advantages cancel in the sum.",
            train,
            {"train/loss": "loss", "train/policy_loss": "policy loss"},
            x="update",
            y="loss",
        ),
        figures.simple(
            "gradient",
            "Gradient norm",
            "Of the policy term alone, and of all terms together.",
            train,
            {"train/policy_grad_norm": "policy", "train/total_grad_norm": "total"},
            x="update",
            y="norm",
        ),
        figures.simple(
            "kl",
            "Distance to the behaviour policy",
            "KL of the trainer's policy and the one that sampled.",
            train,
            {"train/kl_train_behaviour": "KL(train || behaviour)"},
            x="update",
            y="nats",
        ),
        figures.simple(
            "entropy",
            "Entropy",
            "Mean entropy of the policy over active tokens.",
            train,
            {"train/entropy": "entropy"},
            x="update",
            y="nats",
        ),
        figures.simple(
            "tis",
            "Truncated importance sampling",
            "Share of tokens whose weight was clipped.",
            train,
            {"train/tis/clip_share": "clip share"},
            x="update",
            y="share",
        ),
        figures.simple(
            "moe",
            "Router load",
            "Worst layer's largest expert load over its mean; 1 is uniform.",
            train,
            {"train/moe/max_mean_load_ratio": "max / mean"},
            x="update",
            y="ratio",
        ),
    ]
    # A dense model has no router, a run without TIS no weights: no card for those.
    return [c for c in charts if c.traces or c.id not in {"moe", "tis", "entropy", "kl"}]


def rollout_charts(rollout: Sequence[Point]) -> list[Chart]:
    """What was generated."""
    return [
        figures.simple(
            "length",
            "Response length",
            "Mean tokens per response.",
            rollout,
            {"rollout/length_mean": "length"},
            x="collection",
            y="tokens",
        ),
        figures.simple(
            "cap",
            "Cap share",
            "Share of responses cut off at the longest allowed length.",
            rollout,
            {"rollout/cap_share": "cap share"},
            x="collection",
            y="share",
        ),
        figures.staleness(rollout),
        figures.staleness_histogram(rollout),
        figures.simple(
            "groups",
            "Mixed and equal groups",
            "Equal groups (all rewards the same) carry no policy gradient.",
            rollout,
            {"rollout/mixed_groups": "mixed", "rollout/equal_groups": "equal"},
            x="collection",
            y="groups",
        ),
        figures.simple(
            "throughput",
            "Tokens per second",
            "Generated tokens of the collection; read it beside length and cap share.",
            rollout,
            {"rollout/tokens_per_s": "tokens/s"},
            x="collection",
            y="tokens/s",
        ),
    ]


def time_charts(run: RunFiles, train: Sequence[Point], timing: Sequence[Row]) -> list[Chart]:
    """Where time went."""
    return [
        lanes.lanes(timing, run.history()),
        *figures.occupancy(run.rows("pipeline_occupancy.jsonl").rows),
        figures.simple(
            "publication",
            "Publication",
            "From the trainer's weights to verified engines, and how long requests paused for it.",
            train,
            {"publication/elapsed_s": "total", "publication/pause_s": "pause"},
            x="update",
            y="seconds",
        ),
    ]


def facts(workflow: Row, plan: Row, written_at: float) -> list[str]:
    """The line under the name."""
    found = [
        f"{key} {value:.0f}" for key in ("attempt", "epoch") if (value := number(workflow, key))
    ]
    if (ended_by := workflow.get("ended_by")) is not None:
        found.append(f"ended by {ended_by}")
    topology = mapping(plan, "topology")
    requested = (number(topology, "replicas") or 0) * (number(topology, "gpus_per_replica") or 0)
    if requested:
        active = requested - (number(topology, "idle_gpus") or 0)
        found.append(
            f"GPUs: {requested:.0f} requested, {active:.0f} active, allocated not recorded"
        )
    found.append(_heartbeat(workflow, written_at))
    found.append(f"written {_utc(written_at)}")
    return found


def tiles(
    workflow: Row, train: Sequence[Point], rollout: Sequence[Point], evaluations: Sequence[Point]
) -> list[tuple[str, str, str]]:
    """Figures at the top: (label, value, what it is)."""
    seen, expected = mapping(workflow, "seen"), mapping(workflow, "expected")
    made = number(seen, "updates")
    if made is None:
        made = max((p.step for p in train if not p.is_superseded), default=None)
    found = [("Updates", _count(made), f"of {_count(number(expected, 'updates'))}")]
    found += [
        _recent("Reward", rollout, "rollout/reward_mean", "{:.3f}"),
        _recent("Tokens/s", rollout, "rollout/tokens_per_s", "{:,.0f}"),
        _recent("Response length", rollout, "rollout/length_mean", "{:,.1f}"),
        _recent("Staleness", rollout, "rollout/staleness_mean", "{:.2f}"),
    ]
    for point in reversed(evaluations):
        means = [k for k in point.values if k.endswith("/mean") and k.count("/") == 2]
        if means and not point.is_superseded:
            name = means[0].split("/")[1]
            value = f"{point.values[means[0]]:.3f}"
            found.append((f"Evaluation {name}", value, f"at update {point.step:g}"))
            break
    return found


def _recent(label: str, points: Sequence[Point], key: str, form: str) -> tuple[str, str, str]:
    values = [p.values[key] for p in points if key in p.values and not p.is_superseded][-10:]
    if not values:
        return label, "-", "not recorded"
    return label, form.format(sum(values) / len(values)), f"mean of the last {len(values)}"


def evidence(workflow: Row) -> list[tuple[str, str, str, str]]:
    """Counts expected and seen: (what, seen, expected, good | open | unknown)."""
    seen, expected = mapping(workflow, "seen"), mapping(workflow, "expected")
    rows: list[tuple[str, str, str, str]] = []
    for what in ("updates", "checkpoints", "evaluations", "exports"):
        have, want = number(seen, what), number(expected, what)
        verdict = "unknown" if have is None or want is None else "good" if have >= want else "open"
        rows.append((what, _count(have), _count(want), verdict))
    return rows


def collection_table(rollout: Sequence[Point]) -> list[dict[str, object]]:
    """The newest collections, newest first."""
    names = (
        "reward_mean", "length_mean", "cap_share", "mixed_groups", "equal_groups",
        "staleness_mean", "staleness_max", "num_groups", "num_tokens", "tokens_per_s",
    )  # fmt: skip
    return [
        {
            "id": f"{p.step:g}",
            "epoch": p.epoch,
            "superseded": p.is_superseded,
            "values": [_figure(p.values.get(f"rollout/{name}")) for name in names],
        }
        for p in reversed(rollout[-MAX_TABLE_ROWS:])
    ]


def latest_metrics(*axes: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Every metric's newest value of the current history: (name, value, step)."""
    newest: dict[str, tuple[str, str]] = {}
    for points in axes:
        for p in points:
            if not p.is_superseded:
                newest |= {k: (_figure(v), f"{p.step:g}") for k, v in p.values.items()}
    return [(name, value, step) for name, (value, step) in sorted(newest.items())]


def _gap_limit(run: RunFiles) -> float | None:
    rows = run.contracts().get("policy_agreement")
    return None if rows is None or not rows.rows else number(rows.rows[-1], "limit")


def _name(workflow: Row, plan: Row, root: Path) -> str:
    for source in (workflow, plan):
        for key in ("run", "name"):
            if isinstance(value := source.get(key), str):
                return value
    return root.name


def _heartbeat(workflow: Row, now: float) -> str:
    at = number(mapping(workflow, "heartbeat"), "time")
    if at is None:
        return "no heartbeat recorded"
    age = max(0.0, now - at)
    unit, size = next(((u, n) for u, n in _AGES if age >= 2 * n), ("s", 1.0))
    return f"last heartbeat {_utc(at)} ({age / size:,.0f} {unit} before)"


_AGES = (("days", 86_400.0), ("hours", 3600.0), ("min", 60.0), ("s", 1.0))


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def _list(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else []


def _inline_json(value: Mapping[str, Any]) -> Markup:
    # "</script>" and "<!--" inside a string would end or comment out the element.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m runtime.analysis.report ROOT``; 0, or 2 for a root that is none."""
    parser = argparse.ArgumentParser(prog="milepost report", description=__doc__)
    parser.add_argument("root", type=Path, help="output root of a run")
    parser.add_argument("--json", action="store_true", help="answer as one JSON object")
    args = parser.parse_args(argv)
    try:
        path = write_report(args.root)
    except NotADirectoryError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    answer = json.dumps({"report": str(path)}) if args.json else str(path)
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
