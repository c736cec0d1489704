"""Every receipt of a run, for whoever goes through all of them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import structlog

from runtime.errors import StoreError
from runtime.evaluation.found import EVERY, evaluation_folders
from runtime.evaluation.receipts import FIRST_DELAY_S, EvaluationReceipt, derive
from runtime.rundir import history
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record
from runtime.telemetry.events import Event

_log: structlog.stdlib.BoundLogger = structlog.get_logger("evaluation")


def receipts_of(
    root: RunRoot,
    records: tuple[Record, ...],
    policies: str = EVERY,
    *,
    known: Container[Path] = (),
    first_delay_s: float = FIRST_DELAY_S,
) -> Iterator[tuple[Path, EvaluationReceipt]]:
    """Every evaluation of a run with its folder, by policy and set; damaged ones are logged.

    Args:
        root: the run.
        records: the chain, to tell which policies stand.
        policies: see ``evaluation_folders``.
        known: folders that are not read again.
        first_delay_s: see ``derive``.
    """
    for found, path in evaluation_folders(root, policies):
        if path in known:
            continue
        try:
            stands = history.is_standing(records, found)
            receipt = derive(path, stands=stands, first_delay_s=first_delay_s)
        except StoreError as error:
            _log.warning(Event.EVALUATION_FAILED, folder=str(path), error=error.message)
            continue
        if receipt is not None:
            yield path, receipt
