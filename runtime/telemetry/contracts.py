"""Evidence of the contracts: ``contracts/<name>.jsonl``, one file per contract.

A row is written before a violation is raised, so that the numbers of a fatal end are on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.protocol import Axis, TrackingSink
from runtime.telemetry.rows import RowWriter

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_log = get_logger()


class ContractLog:
    """Writes rows of named contracts. A name is a file: a small closed set, never data."""

    def __init__(
        self,
        folder: Path,
        open_rows: Callable[[Path], RowWriter],
        *,
        sink: TrackingSink | None = None,
    ) -> None:
        """Make the log.

        Args:
            folder: ``contracts/`` of the run.
            open_rows: makes the writer of one file (and registers it for flushing).
            sink: gets the numbers as ``contracts/<name>/<key>`` too; W&B holds the same series.
        """
        self._folder = folder
        self._sink = sink
        self._open_rows = open_rows
        self._writers: dict[str, RowWriter] = {}

    def write(
        self, name: str, *, update: int | None, holds: bool | None, values: Mapping[str, object]
    ) -> None:
        """Write one measurement.

        Args:
            name: the contract: policy_agreement, optimizer, publication, data, replay, router_load
                …
            update: the update it was measured at.
            holds: False for a violation; None where it was not measured or is not guarded.
            values: its numbers; null where not measured.

        Raises:
            ValueError: if ``name`` is no contract name.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a contract name: {name!r}")
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = self._open_rows(self._folder / f"{name}.jsonl")
        writer.append({"contract": name, "update": update, "holds": holds, **values})
        if self._sink is not None and update is not None:
            self._sink.log(Axis.TRAIN, update, _numbers(name, holds, values))
        if holds is False:
            writer.flush()
            _log.error(Event.CONTRACT_VIOLATED, contract=name, update=update, **values)


def _numbers(name: str, holds: bool | None, values: Mapping[str, object]) -> dict[str, float]:
    measured = {
        f"contracts/{name}/{key}": float(value)
        for key, value in values.items()
        if isinstance(value, int | float)
    }
    if holds is not None:
        measured[f"contracts/{name}/holds"] = float(holds)
    return measured
