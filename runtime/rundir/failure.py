"""Failures as they are stored, and when two of them are the same."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from runtime.errors import RetryBy, RunError

Kind = Literal["death", "exception", "connection"]
"""``death``: ended by a signal or by memory; ``connection``: a lost or collective call."""

_KIND_RANK: dict[Kind, int] = {"death": 0, "exception": 1, "connection": 2}
_MAX_MESSAGE = 2000
_NORMAL_FORM: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\be\d+\.u\d+\b"), "<policy>"),
    (re.compile(r"\b0x[0-9a-f]+\b"), "<n>"),
    (re.compile(r"(?:/[\w.@+-]+){2,}/?"), "<path>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b"), "<n>"),
    (re.compile(r"\d+(?:\.\d+)?"), "<n>"),
    (re.compile(r"\s+"), " "),
)


class Failure(BaseModel):
    """One failure: what broke, where, who may try again, and where to look next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    id: str
    """Names this occurrence; ``control/retry-<id>`` asks for one more try."""
    error_class: str
    """Name of the error's class."""
    step: str
    """The step it happened in, as ``runtime.session.steps`` writes it."""
    fingerprint: str
    """Equal for failures with the same class, step and normalised message."""
    message: str
    next_check: str
    retry: RetryBy
    kind: Kind = "exception"
    time: float
    """Seconds since the Unix epoch, by the writer's clock."""
    detail: dict[str, JsonValue] = Field(default_factory=dict)
    attached: tuple[str, ...] = ()
    """Messages of the other failures that came with this one."""

    @classmethod
    def of(
        cls, error: BaseException, *, step: str, time: float, kind: Kind | None = None
    ) -> Failure:
        """Describe an exception; one that is not a RunError may be retried by nobody.

        Args:
            error: what was raised.
            step: the step it happened in.
            time: seconds since the Unix epoch.
            kind: what sort of failure it is; None derives it from the exception.
        """
        message = str(error) or type(error).__name__
        is_ours = isinstance(error, RunError)
        if kind is None:
            kind = "connection" if isinstance(error, ConnectionError) else "exception"
        return cls(
            id=f"f-{secrets.token_hex(4)}",
            error_class=type(error).__name__,
            step=step,
            fingerprint=fingerprint(type(error).__name__, step, message),
            message=message[:_MAX_MESSAGE],
            next_check=error.next_check if is_ours else RunError.next_check,
            retry=error.retry if is_ours else RetryBy.NOBODY,
            kind=kind,
            time=time,
            detail=_json_detail(error.detail) if is_ours else {},
        )

    @property
    def is_exempt(self) -> bool:
        """Never counted as deterministic: preemption, interruption, group-level serving errors."""
        return self.retry in (RetryBy.LAUNCH, RetryBy.GROUP)


def fingerprint(error_class: str, step: str, message: str) -> str:
    """Identity of a failure: 16 hex digits over class, step and normalised message.

    Numbers, ids, hex strings and paths in the message do not count. The step counts as written:
    the same step failing twice is deterministic, different steps are not.
    """
    text = "\n".join((error_class, step, normalise(message)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalise(message: str) -> str:
    """The message without what differs from one occurrence to the next. Idempotent."""
    text = message.lower()
    for pattern, replacement in _NORMAL_FORM:
        text = pattern.sub(replacement, text)
    return text.strip()


def choose_cause(failures: Sequence[Failure]) -> Failure:
    """The cause among failures that came together; the others are attached to it.

    A process's death by signal or memory comes before a local exception, that before a connection
    or collective error; among equals the first in time.

    Args:
        failures: at least one.
    """
    ordered = sorted(failures, key=lambda f: (_KIND_RANK[f.kind], f.time))
    cause, *others = ordered
    attached = (*cause.attached, *(f"{f.error_class}: {f.message}" for f in others))
    return cause.model_copy(update={"attached": attached})


def _json_detail(detail: Mapping[str, object]) -> dict[str, JsonValue]:
    plain = (str, int, float, bool, type(None))
    return {k: v if isinstance(v, plain) else repr(v) for k, v in detail.items()}
