"""Places for metrics: ``metrics.jsonl`` always, W&B where asked for.

The local file is the source of truth that report and tools read; a tracking service gets the same
series.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.protocol import Axis, TrackingSink
from runtime.telemetry.rows import RowWriter
from runtime.telemetry.wandb_sink import WandbSettings, WandbSink

__all__ = ["Axis", "LocalSink", "MultiSink", "TrackingSink", "WandbSettings", "WandbSink"]

_log = get_logger()


class LocalSink:
    """Rows ``{…, axis, step, values}`` in ``metrics.jsonl``."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows

    def log(self, axis: Axis, step: float, values: Mapping[str, float | None]) -> None:
        """Write one row; what the disk refuses is counted by the writer."""
        self._rows.append({"axis": axis.value, "step": step, "values": dict(values)})

    def finish(self) -> None:
        """Flush. Idempotent."""
        self._rows.flush()


class MultiSink:
    """Gives every row to several sinks; one that raises after all is left out from then on."""

    def __init__(self, sinks: Sequence[TrackingSink]) -> None:
        self._sinks = list(sinks)
        self._lock = threading.Lock()

    def log(self, axis: Axis, step: float, values: Mapping[str, float | None]) -> None:
        """Write one row to each."""
        for sink in list(self._sinks):
            try:
                sink.log(axis, step, values)
            except Exception as error:  # a sink may be foreign code, and none may end a run
                self._leave_out(sink, error)

    def finish(self) -> None:
        """Finish each, in order, whatever the others do."""
        for sink in list(self._sinks):
            try:
                sink.finish()
            except Exception as error:  # as above
                self._leave_out(sink, error)

    def _leave_out(self, sink: TrackingSink, error: Exception) -> None:
        with self._lock:
            if sink not in self._sinks:
                return  # another thread met the same failure
            self._sinks.remove(sink)
        _log.warning(
            Event.TRACKING_FAILED,
            sink=type(sink).__name__,
            error=f"{type(error).__name__}: {error}",
        )
