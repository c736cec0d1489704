"""A session's compiler caches: restored once the model is known, published when all is over.

Nothing here raises, and nothing outlasts ``output.cache_wait`` by more than the report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
from pydantic import JsonValue

from runtime.caches import publishing
from runtime.caches.key import CacheKey, key_of
from runtime.caches.publishing import PartReport, Publisher, Restored
from runtime.caches.stores import CacheStore, open_store
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.history import committed_update
from runtime.rundir.receipts import Receipt, write_receipt
from runtime.session.context import Context
from runtime.session.steps import StepKind
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.timing import Stage

_log = get_logger()
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True)
class SessionCaches:
    """One node's caches of one session."""

    context: Context
    recorder: Recorder
    root: Path
    """On local disk; gone after the session."""
    _key: CacheKey | None = field(default=None, init=False)
    _store: CacheStore | None = field(default=None, init=False)

    @classmethod
    def of(cls, context: Context, recorder: Recorder, root: Path) -> SessionCaches | None:
        """The caches of a session; None where its run file keeps none.

        None also where Ray is not the session's own: its processes have their environment already.
        """
        if context.spec.output.compiler_cache is None or context.order.ray == "job":
            return None
        return cls(context=context, recorder=recorder, root=root)

    @property
    def environment(self) -> dict[str, str]:
        """For every process of the session, before it is started."""
        return publishing.environment(self.root)

    async def restore(self, model: Path) -> None:
        """Bring in what was published for this model, layout and machine; else start cold.

        Args:
            model: HF folder of the initial model.
        """
        output = self.context.spec.output
        with self.recorder.timing.stage(Stage.CACHE_RESTORE) as stage:
            try:
                self._key = await anyio.to_thread.run_sync(key_of, model, self._layout())
                assert output.compiler_cache is not None
                self._store = await anyio.to_thread.run_sync(open_store, output.compiler_cache)
                restore = partial(
                    publishing.restore, self.root, self._store, self._key, wait_s=output.cache_wait
                )
                found: Restored = await anyio.to_thread.run_sync(restore)
            except Exception as error:
                _log.warning(Event.CACHE_FAILED, what="restore", error=repr(error))
                return
            stage.cold = not found.parts
            stage.detail.update(parts=dict(found.parts), problems=dict(found.problems))
        self.recorder.lifecycle.record(
            Event.CACHE_RESTORED, parts=dict(found.parts), problems=dict(found.problems)
        )

    async def publish(self, is_terminated: Callable[[], bool]) -> None:
        """Publish what was compiled, within the one wait; the report comes after it.

        Args:
            is_terminated: the hardware is being taken away: nothing more is begun then.
        """
        reports: list[PartReport] = []
        try:
            if self._key is not None and self._store is not None:
                reports = await self._publish(self._key, self._store, is_terminated)
        except Exception as error:
            _log.warning(Event.CACHE_FAILED, what="publish", error=repr(error))
        began, start = self.context.clock.time(), self.context.clock.monotonic()
        try:
            await anyio.to_thread.run_sync(self._report, reports)
        except Exception as error:
            _log.warning(Event.CACHE_FAILED, what="report", error=repr(error))
        elapsed_s = self.context.clock.monotonic() - start
        self.recorder.timing.record(Stage.CACHE_REPORT, start=began, duration_s=elapsed_s)

    async def _publish(
        self, key: CacheKey, store: CacheStore, is_terminated: Callable[[], bool]
    ) -> list[PartReport]:
        output, clock = self.context.spec.output, self.context.clock
        cancelled = threading.Event()
        publisher = Publisher(
            root=self.root,
            store=store,
            key=key,
            by=f"{self.context.spec.name}, attempt {self.context.attempt.number}",
            publishers=output.cache_publishers,
            wait_s=output.cache_wait,
            clock=clock,
            cancelled=cancelled,
        )

        async def watch() -> None:
            while True:
                if is_terminated():
                    cancelled.set()
                await anyio.sleep(_POLL_S)

        began = clock.time()
        reports: list[PartReport] = []
        if is_terminated():
            cancelled.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            reports += await anyio.to_thread.run_sync(publisher.publish)
            tasks.cancel_scope.cancel()
        pack_s = sum(report.pack_s for report in reports)
        publish_s = sum(report.publish_s for report in reports)
        timing = self.recorder.timing
        timing.record(Stage.CACHE_PACK, start=began, duration_s=pack_s)
        timing.record(Stage.CACHE_PUBLISH, start=began + pack_s, duration_s=publish_s)
        return reports

    def _report(self, reports: list[PartReport]) -> None:
        update = max(0, committed_update(Chain(self.context.root).read()))
        detail: dict[str, JsonValue] = {
            report.part: cast("JsonValue", asdict(report)) for report in reports
        }
        policy = PolicyId(self.context.epoch, update)
        write_receipt(
            self.context.root,
            Receipt(
                step=StepKind.CACHE.value,
                epoch=policy.epoch,
                update=policy.update,
                time=self.context.clock.time(),
                detail=detail,
            ),
        )
        self.recorder.lifecycle.record(
            Event.CACHE_PUBLISHED, parts={report.part: report.outcome for report in reports}
        )
        publishing.discard(self.root)

    def _layout(self) -> dict[str, JsonValue]:
        spec, topology = self.context.spec, self.context.plan.topology
        return {
            "trainer_ranks": topology.trainer_ranks,
            "backend": spec.core.backend,
            "compile": spec.core.compile,
            "dtype": spec.model.dtype,
            "engine": spec.rollout.engine,
            "engine_tensor": spec.rollout.tensor,
        }
