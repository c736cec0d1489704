"""Every receipt of a run, for whoever goes through all of them, and results that stand."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from runtime.errors import StoreError
from runtime.evaluation.found import EVERY, at_update, evaluation_folders
from runtime.evaluation.receipts import FIRST_DELAY_S, EvaluationReceipt, derive
from runtime.policy import PolicyId
from runtime.rundir import history
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import Record
from runtime.telemetry.events import Event


def readings_of(
    root: RunRoot,
    records: tuple[Record, ...],
    policies: str = EVERY,
    *,
    known: Container[Path] = (),
    first_delay_s: float = FIRST_DELAY_S,
) -> Iterator[tuple[Path, EvaluationReceipt | StoreError]]:
    """Every evaluation of a run with its folder, by policy and set, or why it cannot be read.

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
            _tell(path, error)
            yield path, error
            continue
        if receipt is not None:
            yield path, receipt


def receipts_of(
    root: RunRoot,
    records: tuple[Record, ...],
    policies: str = EVERY,
    *,
    known: Container[Path] = (),
) -> Iterator[tuple[Path, EvaluationReceipt]]:
    """See ``readings_of``; what cannot be read is logged and passed over."""
    for path, read in readings_of(root, records, policies, known=known):
        if isinstance(read, EvaluationReceipt):
            yield path, read


def standing_result(
    root: RunRoot, records: tuple[Record, ...], *, update: int, set_name: str
) -> tuple[Path, EvaluationReceipt] | None:
    """The folder and receipt of a succeeded evaluation of a set at an update, newest epoch first.

    A result stands if its policy belongs to history, whichever epoch made it. A rewind makes update
    55 anew: only a result whose (epoch, update) stands in the chain counts.

    Raises:
        PartialWrite: if none stands, and a file of the newest epoch's own is damaged. Those of
            older ones are passed over: the newest can make it anew beside them.
    """
    for folder, receipt in reversed([*receipts_of(root, records, at_update(update))]):
        if folder.name == set_name and receipt.stands and receipt.state == "succeeded":
            return folder, receipt
    if (newest := history.newest_epoch(records)) is not None:
        own = root.evaluation(str(PolicyId(newest.epoch, update)), set_name)
        derive(own, stands=True)
    return None


def _tell(path: Path, error: StoreError) -> None:
    import structlog  # here alone: it brings rich, which `status` has no need of

    log = structlog.get_logger("evaluation")
    log.warning(Event.EVALUATION_FAILED, folder=str(path), error=error.message)
