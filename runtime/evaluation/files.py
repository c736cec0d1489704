"""The files of one evaluation, with one writer each.

``evaluations/<policy>/<set>/request.json`` is the session's; so is ``final.json``, the request of a
run that ends where its cadence was skipped as busy; ``tries/<k>/submission.json`` the claim of
whoever submits try k, written *before* the call, so that two flows submit once;
``tries/<k>/started.json`` and ``tries/<k>/result.json`` are the job's. All are created exclusively:
the first writer wins, nobody edits.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from runtime.errors import ManifestConflict, PartialWrite
from runtime.evaluation.records import (
    Request,
    Result,
    SkipReason,
    Started,
    Stored,
    Submission,
    Try,
)
from runtime.rundir import atomic

_S = TypeVar("_S", bound=Stored)


def write_request(folder: Path, request: Request) -> Request:
    """Ask for an evaluation; asking again for the same thing returns the first request.

    Raises:
        ManifestConflict: if something else was asked for under this policy and set.
    """
    standing = _create(folder / "request.json", request)
    if standing.model_copy(update=_incidental(request)) != request:
        raise ManifestConflict(
            f"evaluation {request.key} was requested before, otherwise: its set digest is "
            f"{standing.set_digest[:12]}, now {request.set_digest[:12]}",
            key=request.key,
        )
    return standing


def ask_once(folder: Path, request: Request) -> bool:
    """Ask for an evaluation, unless anybody has asked for that set at that policy before.

    A person and the session may ask at the same moment, for different reasons: whoever is first
    has asked for both. Only what came to nothing as busy is asked for again, by the end of the run.
    Idempotent.

    Returns:
        Whether this request is the one that stands; its asker alone may say that it came to
        nothing.
    """
    if _create(folder / "request.json", request) is request:
        return True
    if request.kind != "final" or not is_busy(read_tries(folder)):
        return False
    return _create(folder / "final.json", request) is request


def claim_try(
    folder: Path, *, by: str, time: float, number: int | None = None
) -> tuple[int, Submission] | None:
    """Claim a try, before submitting it.

    Args:
        folder: ``evaluations/<policy>/<set>``.
        by: who submits.
        time: wall seconds.
        number: ``next_try`` of the receipt that led here: two submitters who saw the same receipt
            claim the same try, and one of them gets it. None takes the next free one, which only
            the session may do: it is the only one of its run.

    Returns:
        Its number and the claim; None where another submitter was first, or the try ended already.

    Raises:
        FileNotFoundError: if nothing was requested here.
        ValueError: if the tries before it were never made.
    """
    request = read_request(folder)
    if request is None:
        raise FileNotFoundError(f"no request in {folder}")
    tries = read_tries(folder)
    wanted = len(tries) if number is None else number
    if wanted > len(tries):
        raise ValueError(f"try {wanted} of {request.key} after only {len(tries)}")
    if wanted < len(tries) and tries[wanted].result is not None:
        return None
    key = f"{request.key}#{wanted}-{secrets.token_hex(4)}"
    claim = Submission(time=time, key=key, by=by)
    path = folder / "tries" / str(wanted) / "submission.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        atomic.write_new(path, _encode(claim))
    except FileExistsError:
        return None
    return wanted, claim


def start_try(folder: Path, number: int, started: Started) -> Started:
    """Say that try ``number`` runs; returns the standing record (the first one's)."""
    return _create(folder / "tries" / str(number) / "started.json", started)


def finish_try(folder: Path, number: int, result: Result) -> Result:
    """Say how try ``number`` ended; returns the standing record (the first one's)."""
    return _create(folder / "tries" / str(number) / "result.json", result)


def has_open_try(folder: Path) -> bool:
    """Whether the newest try has no result yet, by the names of its files alone.

    For an evaluation that cannot be read; see ``EvaluationReceipt.open_try``.
    """
    places = (place for place in folder.glob("tries/*") if place.name.isdigit())
    tries = [place for place in places if any(place.glob("*.json"))]
    newest = max(tries, key=lambda place: int(place.name), default=None)
    return newest is not None and not (newest / "result.json").exists()


def skip(folder: Path, reason: SkipReason, *, time: float) -> Result:
    """Say that the newest try, or the request itself, came to nothing."""
    tries = read_tries(folder)
    open_ = tries[-1].number if tries and tries[-1].result is None else len(tries)
    return finish_try(folder, open_, Result(time=time, state="skipped", reason=reason))


def read_request(folder: Path) -> Request | None:
    """What is asked for now: that of the end of the run, where it came second."""
    return _read(folder / "final.json", Request) or _read(folder / "request.json", Request)


def read_tries(folder: Path) -> tuple[Try, ...]:
    """All tries that were begun, in order.

    Raises:
        PartialWrite: if one of their files is damaged.
    """
    found: list[Try] = []
    while (place := folder / "tries" / str(len(found))).is_dir():
        one = Try(
            number=len(found),
            submission=_read(place / "submission.json", Submission),
            started=_read(place / "started.json", Started),
            result=_read(place / "result.json", Result),
        )
        if one.submission is None and one.started is None and one.result is None:
            break  # the folder of a claim that was never made
        found.append(one)
    return tuple(found)


def is_busy(tries: tuple[Try, ...]) -> bool:
    """The newest came to nothing for want of a place in flight."""
    result = tries[-1].result if tries else None
    return result is not None and result.reason == "busy"


def _create(path: Path, record: _S) -> _S:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        atomic.write_new(path, _encode(record))
    except FileExistsError:
        standing = _read(path, type(record))
        if standing is None:
            raise
        return standing
    return record


def _read(path: Path, model: type[_S]) -> _S | None:
    data = atomic.read_bytes(path)
    if data is None:
        return None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise PartialWrite(
            f"{path} is damaged ({error.error_count()} problems): move it aside and ask again",
            path=str(path),
        ) from error


def _encode(record: BaseModel) -> bytes:
    return record.model_dump_json(indent=1).encode() + b"\n"


def _incidental(request: Request) -> dict[str, object]:
    # Asking again happens at another time, in another attempt, from another snapshot's path.
    return {
        "time": request.time,
        "attempt": request.attempt,
        "epoch": request.epoch,
        "snapshot": request.snapshot,
    }
