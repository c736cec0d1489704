"""The run in the terminal: one line that moves, fed with ``workflow.json``.

On a terminal a bar; elsewhere a plain line when something changed, so that a log stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from runtime.clock import Clock, SystemClock

PLAIN_EVERY_S = 10.0
"""At most one plain line in so many seconds while only numbers change."""


class RunProgress:
    """Shows a run; use it as a context manager and call ``show`` with every poll."""

    def __init__(self, console: Console | None = None, *, clock: Clock | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock or SystemClock()
        self._bar: Progress | None = None
        self._headline: tuple[object, ...] = ()
        self._update: object = None
        self._printed_at = float("-inf")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=28),
                TextColumn("{task.fields[line]}"),
                TimeElapsedColumn(),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("run", total=None, line="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, workflow: Mapping[str, object]) -> None:
        """Show where the run stands; unknown or missing fields are left out."""
        line = describe(workflow)
        if self._bar is not None:
            total = _number(_mapping(workflow, "expected"), "updates")
            done = _number(workflow, "update") or 0
            name = str(workflow.get("run") or "run")
            self._bar.update(
                self._task, description=name, total=total or None, completed=done, line=line
            )
            self._bar.refresh()
            return
        headline = (workflow.get("state"), workflow.get("activity"), workflow.get("failure"))
        now = self._clock.monotonic()
        is_new = headline != self._headline
        has_moved = workflow.get("update") != self._update
        if is_new or (has_moved and now - self._printed_at >= PLAIN_EVERY_S):
            self._headline, self._printed_at = headline, now
            self._update = workflow.get("update")
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(workflow: Mapping[str, object]) -> str:
    """``update 57/200 · reward 0.412 · 3,100 tokens/s · staleness 1.2 · training``.

    Args:
        workflow: ``workflow.json``; its ``detail`` gives ``reward_mean``, ``tokens_per_s`` and
            ``staleness_mean`` of the newest collection.
    """
    parts: list[str] = []
    done = _number(workflow, "update")
    total = _number(_mapping(workflow, "expected"), "updates")
    if done is not None:
        parts.append(f"update {done:.0f}/{total:.0f}" if total else f"update {done:.0f}")
    detail = _mapping(workflow, "detail")
    for key, form in _FIGURES.items():
        if (value := _number(detail, key)) is not None:
            parts.append(form.format(value))
    parts.append(_phase(workflow))
    failure = _mapping(workflow, "failure")
    if failure:
        parts.append(f"{failure.get('error_class', 'failure')}: {failure.get('message', '')}")
    return " · ".join(part for part in parts if part)


_FIGURES = {
    "reward_mean": "reward {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "staleness_mean": "staleness {:.1f}",
}


def _phase(workflow: Mapping[str, object]) -> str:
    state, activity = workflow.get("state"), workflow.get("activity")
    if activity == "running" and (step := workflow.get("step")):
        return str(step)
    if state == "training" and activity:
        return str(activity)
    return str(state or "")


def _mapping(source: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = source.get(key)
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def _number(source: Mapping[str, object], key: str) -> float | None:
    value = source.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
