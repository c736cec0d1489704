"""What became of an evaluation: files with one writer each, and the receipt derived from them.

``evaluations/<policy>/<set>/request.json`` is the session's; so is ``final.json``, the request of a
run that ends where its cadence was skipped as busy; ``tries/<k>/submission.json`` the claim of
whoever submits try k, written *before* the call, so that two flows submit once;
``tries/<k>/started.json`` and ``tries/<k>/result.json`` are the job's. All are created exclusively:
the first writer wins, nobody edits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from runtime.errors import ManifestConflict, PartialWrite
from runtime.evaluation.sets import Kind
from runtime.policy import PolicyId
from runtime.rundir import atomic

Mode = Literal["shared", "background"]
State = Literal["requested", "submitted", "running", "succeeded", "failed", "skipped"]
SkipReason = Literal[
    "busy", "export_failed", "snapshot_missing", "crashed", "engine_unhealthy", "superseded"
]
RESUBMITTED: frozenset[str] = frozenset({"export_failed", "crashed", "engine_unhealthy"})
"""Reasons after which a further try makes sense; the others stay as they are."""
MAX_RESUBMISSIONS = 3
FIRST_DELAY_S = 600.0
"""Before the first resubmission; doubles with each."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    time: float
    """Seconds since the Unix epoch by the writer's clock."""


class Snapshot(BaseModel):
    """The weights a background evaluation reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    digest: str
    lease: str | None = None
    """Pins the snapshot until the evaluation ended."""


class Request(_Stored):
    """What is asked for."""

    run: str
    policy: str
    set: str
    kind: Kind
    required: bool
    mode: Mode
    attempt: int
    epoch: int
    snapshot: Snapshot | None = None
    """None for a shared evaluation: the engines hold the weights."""
    set_digest: str
    sampling: dict[str, JsonValue]
    seed: int

    @property
    def key(self) -> str:
        """Names this evaluation everywhere."""
        return f"{self.run}/{self.policy}/{self.set}"


class Submission(_Stored):
    """The claim of one try."""

    key: str
    """Of this try; also Prefect's idempotency key. Its last part is random: a run of the same name
    in another root, or in the same one emptied, shares a server but no keys."""
    by: str
    """Who submits: session, flow, resubmission, a person."""


class Started(_Stored):
    """The job runs."""

    host: str
    pid: int
    flow_run: str | None = None
    job: str | None = None


class TryError(BaseModel):
    """Why a try failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error_class: str
    fingerprint: str
    message: str
    counts: dict[str, int] = Field(default_factory=dict)
    """Items done, failed, untried, and failures by error class."""
    is_exempt: bool = False
    """Preempted, interrupted, cancelled or a serving error: never counted as deterministic."""


class Result(_Stored):
    """How a try ended."""

    state: Literal["succeeded", "failed", "skipped"]
    reason: SkipReason | None = None
    error: TryError | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    items: str | None = None
    """The items file, relative to the output root."""
    items_sha256: str | None = None
    trainer_update: int | None = None
    """The trainer's update when this was written, where the writer knew it."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if (self.state == "skipped") != (self.reason is not None):
            raise ValueError(f"{self.state} with reason {self.reason}")
        if self.state == "failed" and self.error is None:
            raise ValueError("failed without an error")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """The files of one try; a skip before any submission has a result alone."""

    number: int
    submission: Submission | None
    started: Started | None
    result: Result | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReceipt:
    """Where one evaluation stands."""

    request: Request
    update: int
    state: State
    reason: SkipReason | None
    stands: bool
    """Its update belongs to history; a result of a superseded policy is kept and says so."""
    tries: tuple[Try, ...]
    next_try_at: float | None
    """When a resubmission may follow (wall seconds); None: not by itself."""
    times: dict[State, float]
    """When each state was reached, by its writer's clock."""
    error: TryError | None
    result: Result | None
    lag_updates: int | None
    lag_s: float | None

    @property
    def key(self) -> str:
        """The evaluation's key."""
        return self.request.key

    @property
    def next_try(self) -> int:
        """Number of the try that may be claimed next."""
        return len(self.tries)

    @property
    def open_try(self) -> Try | None:
        """The try that is claimed or runs and has no result yet; None where there is none."""
        newest = self.tries[-1] if self.tries else None
        return newest if newest is not None and newest.result is None else None

    @property
    def is_settled(self) -> bool:
        """Nothing more happens to it by itself: its snapshot may go."""
        if self.state in ("requested", "submitted", "running"):
            return False
        return self.state == "succeeded" or self.next_try_at is None


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
    if request.kind != "final" or not _is_busy(_tries(folder)):
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
    request = _request(folder)
    if request is None:
        raise FileNotFoundError(f"no request in {folder}")
    tries = _tries(folder)
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
    tries = _tries(folder)
    open_ = tries[-1].number if tries and tries[-1].result is None else len(tries)
    return finish_try(folder, open_, Result(time=time, state="skipped", reason=reason))


def derive(
    folder: Path,
    *,
    stands: bool,
    is_alive: Callable[[Try], bool | None] | None = None,
    first_delay_s: float = FIRST_DELAY_S,
) -> EvaluationReceipt | None:
    """The receipt of one evaluation; None where nothing was requested.

    Args:
        folder: ``evaluations/<policy>/<set>``.
        stands: whether the chain keeps its policy (``history.is_standing``).
        is_alive: whether the job of an open try still exists; None where that cannot be known.
        first_delay_s: before the first resubmission, see ``next_try_at``.

    Raises:
        PartialWrite: if one of its files is damaged.
    """
    request = _request(folder)
    if request is None:
        return None
    tries = _tries(folder)
    state, reason = _state(request, tries, stands, is_alive)
    ended = next((t.result for t in tries if t.result and t.result.state == "succeeded"), None)
    last = ended or (tries[-1].result if tries else None)
    update = PolicyId.parse(request.policy).update
    at = None if last is None else last.trainer_update
    return EvaluationReceipt(
        request=request,
        update=update,
        state=state,
        reason=reason,
        stands=stands,
        tries=tries,
        next_try_at=next_try_at(tries, state, reason, first_delay_s=first_delay_s),
        times=_times(request, tries),
        error=last.error if last else None,
        result=ended,
        lag_updates=None if ended is None or at is None else max(0, at - update),
        lag_s=None if ended is None else max(0.0, ended.time - request.time),
    )


def num_resubmissions(tries: tuple[Try, ...]) -> int:
    """Tries after the first; being skipped as busy is none."""
    return max(0, sum(not _is_busy((t,)) for t in tries) - 1)


def next_try_at(
    tries: tuple[Try, ...],
    state: State,
    reason: SkipReason | None,
    *,
    first_delay_s: float = FIRST_DELAY_S,
) -> float | None:
    """When the next try may follow by itself; None: never.

    The n-th resubmission (from 0) comes ``first_delay_s`` x 2**n after the last end; at most three;
    not after the same fingerprint twice, unless those errors are exempt.
    """
    if state not in ("failed", "skipped") or (state == "skipped" and reason not in RESUBMITTED):
        return None
    used = num_resubmissions(tries)
    if used >= MAX_RESUBMISSIONS:
        return None
    prints = [
        t.result.error.fingerprint
        for t in tries
        if t.result and t.result.error and not t.result.error.is_exempt
    ]
    if len(prints) != len(set(prints)):
        return None
    moments = [r.time for t in tries for r in (t.submission, t.started, t.result) if r]
    return max(moments) + first_delay_s * 2**used if moments else None


def _state(
    request: Request,
    tries: tuple[Try, ...],
    stands: bool,
    is_alive: Callable[[Try], bool | None] | None,
) -> tuple[State, SkipReason | None]:
    if any(t.result and t.result.state == "succeeded" for t in tries):
        return "succeeded", None
    if not stands:
        return "skipped", "superseded"
    if not tries or (request.kind == "final" and _is_busy(tries)):
        return "requested", None
    newest = tries[-1]
    if newest.result is not None:
        return newest.result.state, newest.result.reason
    if is_alive is not None and is_alive(newest) is False:
        return "skipped", "crashed"
    return ("running" if newest.started else "submitted"), None


def _is_busy(tries: tuple[Try, ...]) -> bool:
    """The newest came to nothing for want of a place in flight."""
    result = tries[-1].result if tries else None
    return result is not None and result.reason == "busy"


def _times(request: Request, tries: tuple[Try, ...]) -> dict[State, float]:
    times: dict[State, float] = {"requested": request.time}
    for t in tries:
        if t.submission:
            times["submitted"] = t.submission.time
        if t.started:
            times["running"] = t.started.time
        if t.result:
            times[t.result.state] = t.result.time
    return times


def _request(folder: Path) -> Request | None:
    """What is asked for now: that of the end of the run, where it came second."""
    return _read(folder / "final.json", Request) or _read(folder / "request.json", Request)


def _tries(folder: Path) -> tuple[Try, ...]:
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


_S = TypeVar("_S", bound=_Stored)


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
