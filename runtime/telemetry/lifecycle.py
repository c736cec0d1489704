"""What happened to the pipeline and when: ``pipeline_lifecycle.jsonl``, and the log beside it.

Pauses and resumptions of generation, publications, evaluations, engine starts and deaths, commits.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.rows import RowWriter

_log = get_logger()


class LifecycleLog:
    """Writes an event as a row and as a log line, in the order of the calls. Never raises."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows

    def record(self, event: Event, *, update: int | None = None, **fields: object) -> None:
        """Write ``event`` with its data.

        Args:
            event: its name.
            update: the update it belongs to; None outside updates.
            fields: ids, counts and durations; JSON values.
        """
        self._rows.append({"event": event.value, "update": update, **fields})
        _log.info(event, update=update, **fields)

    def heard(self, event: Event, fields: Mapping[str, object]) -> None:
        """``record`` in the shape of the listeners of pool and gate."""
        self._rows.append({"event": event.value, "update": None, **fields})
        _log.info(event, **fields)
