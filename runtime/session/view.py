"""The session's hand on ``workflow.json``: what is being done, how far it is, what failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import anyio
from pydantic import JsonValue

from runtime.clock import Clock
from runtime.errors import DiskFull
from runtime.rundir import workflow
from runtime.rundir.chain import Chain
from runtime.rundir.failure import Failure
from runtime.rundir.history import committed_update
from runtime.rundir.records import Activity, WorkflowState
from runtime.rundir.workflow import Progress, Workflow, WorkflowFile, beat
from runtime.session.context import Context
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger

_log = get_logger()


@dataclass(slots=True)
class SessionView:
    """Holds the present values in memory and writes them every ``HEARTBEAT_S``.

    A full disk costs the view and nothing else. Implements ``retrying.HoldView``.
    """

    _context: Context
    _file: WorkflowFile
    _chain: Chain
    _clock: Clock
    state: WorkflowState = "preparing"
    activity: Activity | None = "running"
    step: str = "prepare"
    update: int = 0
    failure: Failure | None = None
    outstanding: tuple[str, ...] = ()
    detail: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    _progress: Progress = field(init=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False)
    """One write at a time: neither the file nor its reading of the chain is thread-safe."""

    def __post_init__(self) -> None:
        self._progress = Progress(time=self._clock.time(), what="session started")

    @classmethod
    def of(cls, context: Context) -> SessionView:
        """The view of this session."""
        file = WorkflowFile(context.root, epoch=context.epoch, clock=context.clock)
        return cls(context, file, Chain(context.root), context.clock)

    def doing(self, step: str, *, state: WorkflowState | None = None) -> None:
        """A step began; in the view at the next heartbeat."""
        self.step = step
        self.state = state or self.state
        self.moved(f"{step} began")

    def moved(self, what: str) -> None:
        """Progress of any kind: deadlines of those who wait count from here."""
        self._progress = Progress(time=self._clock.time(), what=what)

    def failed(self, failure: Failure, *, attempt: int, held: bool) -> None:
        """A try of a step failed."""
        self.failure = failure
        self.activity = "held" if held else "running"
        event = Event.SESSION_HELD if held else Event.STEP_RETRIED
        _log.warning(event, tries=attempt, **failure.model_dump(mode="json"))
        self.moved(f"{failure.step} failed, try {attempt}" + (", held" if held else ""))

    def recovered(self, failure: Failure) -> None:
        """The step went through after all."""
        self.failure = None
        self.activity = "running"
        _log.info(Event.SESSION_RELEASED, failure_id=failure.id)
        self.moved(f"{failure.step} went through")

    def write(self) -> None:
        """Write now; from any thread, beside the heartbeat's own write too.

        Blocks on the disk.

        Raises:
            FencedError: if a newer owner exists.
        """
        with self._turn:
            self._write()

    def _write(self) -> None:
        records = self._chain.read()
        committed = committed_update(records)
        root = self._context.root
        view = Workflow(
            run=self._context.spec.name,
            state=self.state,
            activity=self.activity,
            since=self._clock.time(),
            attempt=self._context.attempt.number,
            epoch=self._context.epoch,
            update=self.update,
            step=self.step,
            expected=self._context.order.expected,
            seen=workflow.count_seen(root, records, update=self.update),
            outstanding=self.outstanding,
            last_checkpoint=committed if committed >= 0 else None,
            failure=self.failure,
            training_digest=self._context.order.training_digest,
            heartbeat=beat(0, self._clock.time()),
            progress=self._progress,
            paths=root.artifacts(),
            detail=dict(self.detail),
        )
        try:
            self._file.write(view)
        except DiskFull as error:
            _log.warning(Event.ROWS_DROPPED, file="workflow.json", error=error.message)

    async def beat_for_ever(self) -> None:
        """Write at every heartbeat until cancelled.

        Raises:
            FencedError: if a newer owner exists; the session ends with it.
        """
        while True:
            await anyio.to_thread.run_sync(self.write)
            await anyio.sleep(workflow.HEARTBEAT_S)
