"""The receipt of an evaluation: what became of it, derived from its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.evaluation.files import is_busy, read_request, read_tries
from runtime.evaluation.records import Request, Result, SkipReason, Try, TryError
from runtime.policy import PolicyId

State = Literal["requested", "submitted", "running", "succeeded", "failed", "skipped"]
RESUBMITTED: frozenset[str] = frozenset({"export_failed", "crashed", "engine_unhealthy"})
"""Reasons after which a further try makes sense; the others stay as they are."""
MAX_RESUBMISSIONS = 3
FIRST_DELAY_S = 600.0
"""Before the first resubmission; doubles with each."""


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
    request = read_request(folder)
    if request is None:
        return None
    tries = read_tries(folder)
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
    return max(0, sum(not is_busy((t,)) for t in tries) - 1)


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
    if not tries or (request.kind == "final" and is_busy(tries)):
        return "requested", None
    newest = tries[-1]
    if newest.result is not None:
        return newest.result.state, newest.result.reason
    if is_alive is not None and is_alive(newest) is False:
        return "skipped", "crashed"
    return ("running" if newest.started else "submitted"), None


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
