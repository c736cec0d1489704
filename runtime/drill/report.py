"""A campaign's outcome as one JSON object and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from runtime.drill.campaign import Outcome, Taken


def as_object(outcome: Outcome) -> dict[str, Any]:
    """The answer of ``milepost drill --json``; seconds are medians."""
    return {
        "kills": len(outcome.taken),
        "fired": len(outcome.taken),
        "lost": sum(v.lost for v in outcome.verdicts.values()),
        "doubled": sum(v.doubled for v in outcome.verdicts.values()),
        "orphans": sum(v.orphans for v in outcome.verdicts.values()),
        "updates_redone": outcome.updates_redone,
        "seed": outcome.seed,
        "runs": sum(number > 0 for number in outcome.verdicts),
        "unreached": outcome.unreached,
        "problems": outcome.problems,
        "faults": _rows(outcome),
    }


def table(outcome: Outcome) -> list[str]:
    """The same for people, in Markdown."""
    head = (
        "fault", "times fired", "detected after", "decided after", "recovered after",
        "prompts lost", "doubled",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cell(v) for v in row.values()) + " |" for row in _rows(outcome)]
    return lines


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    by_name: dict[str, list[Taken]] = {}
    for taken in outcome.taken:
        by_name.setdefault(taken.blow.name, []).append(taken)
    return [_row(name, by_name[name], outcome) for name in sorted(by_name)]


def _row(name: str, taken: Sequence[Taken], outcome: Outcome) -> dict[str, Any]:
    runs = {t.run for t in taken}
    verdicts = [v for n, v in outcome.verdicts.items() if n in runs]
    return {
        "fault": name,
        "fired": len(taken),
        "detected_s": _median([t.detected_s for t in taken]),
        "decided_s": _median([t.decided_s for t in taken]),
        "recovered_s": _median([t.recovered_s for t in taken]),
        "lost": sum(v.lost for v in verdicts),
        "doubled": sum(v.doubled for v in verdicts),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(statistics.median(known), 2) if known else None


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if isinstance(value, float) else str(value)
