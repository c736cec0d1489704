"""The record of serving errors: series on an axis of their own, and rows with the particulars.

Counts start at 0 with the process. Nothing that goes wrong in recording stops anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.clock import Clock
from runtime.errors import RunError, ServingError
from runtime.rollout.stop_rule import StopRule
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

EVERY_S = 15.0
MAX_BODY_CHARS = 500
"""Of an error's message or answer body in a row: ids and a cause fit, a page of HTML does not."""
KINDS = ("transport", "overload", "unavailable", "timeout")

_log = get_logger()

Series = Callable[[Mapping[str, float]], None]
Row = Callable[[Mapping[str, object]], None]


class ErrorsLog:
    """Counts failed attempts by class and writes them every 15 s and at the end.

    Args:
        rule: the stop rule; attempts are recorded in it here, so that both count the same.
        requeued: group attempts sent back so far, from the ledger.
        clock: monotonic, for the axis.
        series: takes ``errors/*`` values for the tracking sink, or None.
        row: takes one row of ``rollout_errors.jsonl`` and stamps it with wall-clock time, or None.
    """

    def __init__(
        self,
        *,
        rule: StopRule,
        requeued: Callable[[], int],
        clock: Clock,
        series: Series | None = None,
        row: Row | None = None,
    ) -> None:
        self._rule = rule
        self._requeued = requeued
        self._requeued_before = requeued()
        self._clock = clock
        self._series = series
        self._row = row
        self._started = clock.monotonic()
        self._written_at = self._started
        self._failed: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._completed = 0
        self._is_fatal = False

    def succeeded(self) -> None:
        """A group attempt got all its responses; counted before rewards and filters."""
        self._completed += 1
        self._rule.record(failed=False)

    def failed(self, error: ServingError, *, prompt: str, attempt: int) -> None:
        """A group attempt failed as a whole, however many of its samples did."""
        self._completed += 1
        self._failed[error.kind] = self._failed.get(error.kind, 0) + 1
        self._rule.record(failed=True)
        self._write_row(
            {"kind": "failure", "class": error.kind, "prompt": prompt, "attempt": attempt}
            | describe(error)
        )

    def values(self) -> dict[str, float]:
        """All series as of now."""
        reading = self._rule.read()
        return {
            "errors/elapsed_seconds": self._clock.monotonic() - self._started,
            **{f"errors/{kind}_groups": float(n) for kind, n in self._failed.items()},
            "errors/completed_group_attempts": float(self._completed),
            "errors/requeued_groups": float(self._requeued() - self._requeued_before),
            "errors/window_group_attempts": float(reading.window_attempts),
            "errors/window_failed_groups": float(reading.window_failed),
            "errors/failure_fraction_5m": reading.fraction,
            "errors/high_failure_seconds": reading.high_s,
            "errors/fatal": float(self._is_fatal),
        }

    def tick(self) -> None:
        """Write the series if 15 s have passed since the last time."""
        now = self._clock.monotonic()
        if now - self._written_at >= EVERY_S:
            self._written_at = now
            self._write("series")

    def close(self, fatal: BaseException | None) -> None:
        """Write the series once more, and a short summary of how the producer ended."""
        self._is_fatal = fatal is not None
        self._write("series")
        summary: dict[str, object] = {"kind": "summary", **self.values()}
        if fatal is not None:
            summary |= describe(fatal)
        self._write_row(summary)

    def _write(self, kind: str) -> None:
        values = self.values()
        if self._series is not None:
            try:
                self._series(values)
            except Exception as error:
                _log.warning(Event.TRACKING_FAILED, series="errors", error=repr(error))
        self._write_row({"kind": kind, **values})

    def _write_row(self, row: Mapping[str, object]) -> None:
        if self._row is None:
            return
        try:
            self._row(row)
        except Exception as error:
            _log.warning(Event.ROWS_DROPPED, path="rollout_errors.jsonl", error=repr(error))


def describe(error: BaseException) -> dict[str, object]:
    """Type, bounded message and bounded details of an error: log fields, never metric names."""
    detail: Mapping[str, object] = error.detail if isinstance(error, RunError) else {}
    return {
        "error": type(error).__name__,
        "message": _bounded(str(error)),
        "detail": {key: _bounded(value) for key, value in detail.items()},
    }


def _bounded(value: object) -> object:
    if isinstance(value, int | float | bool | None):
        return value
    text = str(value)
    cut = len(text) - MAX_BODY_CHARS
    return text if cut <= 0 else f"{text[:MAX_BODY_CHARS]}... ({cut} more)"
