"""Stage times of the driver: one row per stage in ``driver_timing.jsonl``.

Stages overlap (rollout goes on while the trainer works), so durations never add up to wall time and
nobody may add them. Cold runs of a stage (compile, restore, first call in a process) are marked
apart from warm ones.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Self

from runtime.clock import Clock
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.rows import RowWriter

_log = get_logger()


class Cost(StrEnum):
    """What a stage's time is spent on; reports keep these apart."""

    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    SCORING = "scoring"
    OPTIMISATION = "optimisation"
    PUBLICATION = "publication"
    CHECKPOINT = "checkpoint"
    ORCHESTRATION = "orchestration"


class Stage(StrEnum):
    """Names of the stages, each with its cost."""

    cost: Cost

    def __new__(cls, name: str, cost: Cost) -> Self:
        """A member is its name; the cost rides along."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.cost = cost
        return member

    PREPARE = "prepare", Cost.ORCHESTRATION
    START_TRAINER = "start_trainer", Cost.ORCHESTRATION
    START_ENGINES = "start_engines", Cost.ORCHESTRATION
    RESTORE = "restore", Cost.CHECKPOINT
    CACHE_RESTORE = "cache_restore", Cost.ORCHESTRATION
    ROLLOUT_WAIT = "rollout_wait", Cost.ROLLOUT
    """The trainer waits for a collection."""
    SCORE = "score", Cost.SCORING
    TRAIN = "train", Cost.OPTIMISATION
    DIAGNOSE = "diagnose", Cost.OPTIMISATION
    """Diagnostics such as the second backward of the policy gradient norm."""
    PUBLISH = "publish", Cost.PUBLICATION
    STAGE_STATE = "stage_state", Cost.CHECKPOINT
    """The copy to host memory: the trainer's whole stall for a commit."""
    COMMIT = "commit", Cost.CHECKPOINT
    """Files and record, beside training."""
    UPLOAD = "upload", Cost.CHECKPOINT
    EVALUATE = "evaluate", Cost.EVALUATION
    SNAPSHOT = "snapshot", Cost.CHECKPOINT
    """The weights leave the trainer for a background evaluation: its whole stall for it."""
    EXPORT = "export", Cost.CHECKPOINT
    DRAIN = "drain", Cost.ORCHESTRATION
    BOUNDARY = "boundary", Cost.ORCHESTRATION
    """Bookkeeping between collections."""
    HELD = "held", Cost.ORCHESTRATION
    CACHE_PACK = "cache_pack", Cost.ORCHESTRATION
    CACHE_PUBLISH = "cache_publish", Cost.ORCHESTRATION
    CACHE_REPORT = "cache_report", Cost.ORCHESTRATION
    SHUTDOWN = "shutdown", Cost.ORCHESTRATION


@dataclass(slots=True, kw_only=True)
class OpenStage:
    """A stage under way; ``cold`` and ``detail`` may be set until it ends."""

    stage: Stage
    update: int | None
    started: float
    """Wall seconds."""
    started_monotonic: float
    cold: bool
    span_id: str
    detail: dict[str, object]


class StageTimer:
    """Times stages and writes a row when each ends. Safe from several tasks and threads at once."""

    def __init__(self, rows: RowWriter, *, clock: Clock) -> None:
        self._rows = rows
        self._clock = clock
        self._ids = count(1)
        self._lock = threading.Lock()
        self._seen: set[Stage] = set()
        self._open: dict[str, OpenStage] = {}

    @contextmanager
    def stage(
        self, stage: Stage, *, update: int | None = None, cold: bool | None = None, **detail: object
    ) -> Generator[OpenStage]:
        """Time what happens inside.

        Args:
            stage: which one.
            update: the update it makes or belongs to; None outside updates.
            cold: whether it pays for a start (compile, restore); None: cold the first time here.
            detail: further fields of the row.
        """
        opened = self._begin(stage, update, cold, detail)
        _log.debug(Event.STAGE_STARTED, stage=stage, update=update, span_id=opened.span_id)
        try:
            yield opened
        except BaseException as error:
            self._end(opened, type(error).__name__)
            _log.debug(Event.STAGE_FAILED, stage=stage, update=update, span_id=opened.span_id)
            raise
        elapsed = self._end(opened, None)
        _log.debug(
            Event.STAGE_FINISHED,
            stage=stage,
            update=update,
            span_id=opened.span_id,
            elapsed_s=elapsed,
        )

    def record(
        self,
        stage: Stage,
        *,
        start: float,
        duration_s: float,
        update: int | None = None,
        cold: bool | None = None,
        **detail: object,
    ) -> None:
        """Write a stage that was timed elsewhere (``start`` in wall seconds)."""
        with self._lock:
            is_cold = stage not in self._seen if cold is None else cold
            self._seen.add(stage)
        self._write(stage, update, start, duration_s, is_cold, f"s{next(self._ids)}", None, detail)

    def open_stages(self) -> list[tuple[Stage, float]]:
        """Stages under way and their age in seconds, oldest first: what is being waited for."""
        now = self._clock.monotonic()
        with self._lock:
            return [(o.stage, now - o.started_monotonic) for o in self._open.values()]

    def _begin(
        self, stage: Stage, update: int | None, cold: bool | None, detail: dict[str, object]
    ) -> OpenStage:
        with self._lock:
            opened = OpenStage(
                stage=stage,
                update=update,
                started=self._clock.time(),
                started_monotonic=self._clock.monotonic(),
                cold=stage not in self._seen if cold is None else cold,
                span_id=f"s{next(self._ids)}",
                detail=detail,
            )
            self._seen.add(stage)
            self._open[opened.span_id] = opened
        return opened

    def _end(self, opened: OpenStage, error: str | None) -> float:
        elapsed = self._clock.monotonic() - opened.started_monotonic
        with self._lock:
            del self._open[opened.span_id]
        self._write(
            opened.stage,
            opened.update,
            opened.started,
            elapsed,
            opened.cold,
            opened.span_id,
            error,
            opened.detail,
        )
        return elapsed

    def _write(
        self,
        stage: Stage,
        update: int | None,
        start: float,
        duration_s: float,
        cold: bool,
        span_id: str,
        error: str | None,
        detail: dict[str, object],
    ) -> None:
        self._rows.append(
            {
                "name": stage.value,
                "cost": stage.cost.value,
                "update": update,
                "start": round(start, 6),
                "duration_s": round(duration_s, 6),
                "cold": cold,
                "span_id": span_id,
                "error": error,
                **detail,
            }
        )
