"""A session's compiler caches: restored once the model is known, published when all is over.

Nothing here raises, and nothing outlasts ``output.cache_wait`` by more than the report; on a group
of nodes, by more than their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
from pydantic import JsonValue

from runtime.caches import parts as cache_parts
from runtime.caches import publishing
from runtime.caches.publishing import PartReport, Restored
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.history import committed_update
from runtime.rundir.receipts import Receipt, write_receipt
from runtime.session.context import Context
from runtime.session.node_caches import CacheOrder, GroupCaches, NodeCache, once
from runtime.session.nodes import Nodes
from runtime.session.scratch import CACHES_VARIABLE
from runtime.session.steps import StepKind
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.timing import Stage

_log = get_logger()
_ALONE = ""
"""Stands for the one node of a session that has no group."""

Reports = Mapping[str, Sequence[PartReport] | Exception]
"""By address of the node."""


@dataclass(slots=True, kw_only=True)
class SessionCaches:
    """The caches of one session, on its own node or on all hosts of its group."""

    context: Context
    recorder: Recorder
    root: Path
    """On local disk, of every node; gone after the session."""
    _node: NodeCache | None = field(default=None, init=False)
    _group: GroupCaches | None = field(default=None, init=False)
    _gathered: Reports = field(default_factory=dict[str, Sequence[PartReport]], init=False)

    @classmethod
    def of(cls, context: Context, recorder: Recorder, root: Path) -> SessionCaches | None:
        """The caches of a session; None where its run file keeps none."""
        if context.spec.output.compiler_cache is None:
            return None
        return cls(context=context, recorder=recorder, root=root)

    @property
    def environment(self) -> dict[str, str]:
        """For every process of the session, before it is started."""
        return {CACHES_VARIABLE: str(self.root), **cache_parts.environment(self.root)}

    async def restore(self, model: Path, nodes: Nodes | None = None) -> None:
        """Bring in what was published for this model, layout and machine; else start cold.

        Args:
            model: HF folder of the initial model.
            nodes: of the attempt; None, or none in it: this host alone.
        """
        order = self._order(model)
        with self.recorder.timing.stage(Stage.CACHE_RESTORE) as stage:
            try:
                if nodes is None or not nodes.nodes:
                    self._node = NodeCache(order)
                    found = {_ALONE: await _restored(self._node)}
                else:
                    found = await self._restore_group(order, nodes)
            except Exception as error:
                _log.warning(Event.CACHE_FAILED, what="restore", error=repr(error))
                return
            # A start is as cold as its coldest node.
            stage.cold = not found or not all(node.parts for node in found.values())
            parts = {_named(a, p): n for a, node in found.items() for p, n in node.parts.items()}
            problems = {
                _named(a, p): why for a, node in found.items() for p, why in node.problems.items()
            }
            stage.detail.update(parts=parts, problems=problems)
        self.recorder.lifecycle.record(Event.CACHE_RESTORED, parts=parts, problems=problems)

    async def _restore_group(self, order: CacheOrder, nodes: Nodes) -> dict[str, Restored]:
        self._group = GroupCaches(
            order=order, attempt_dir=str(self.context.attempt.path), epoch=self.context.epoch
        )
        answers = await self._group.restore(
            nodes,
            trainer_ranks=self.context.plan.topology.trainer_ranks,
            engines=self.context.spec.rollout.engines,
        )
        return {
            address: Restored(parts={}, problems={"all": repr(found)})
            if isinstance(found, Exception)
            else found
            for address, found in answers.items()
        }

    async def gather(self, is_terminated: Callable[[], bool]) -> None:
        """Publish on the nodes of a group, while they can be reached; ``publish`` tells of it.

        Args:
            is_terminated: the hardware is being taken away: nothing more is begun then.
        """
        if self._group is None:
            return
        try:
            with self._timed() as reports:
                reports |= await self._group.publish(is_terminated)
        except Exception as error:
            _log.warning(Event.CACHE_FAILED, what="publish", error=repr(error))

    async def publish(self, is_terminated: Callable[[], bool]) -> None:
        """Publish what was compiled, within the one wait; the report comes after it.

        Args:
            is_terminated: the hardware is being taken away: nothing more is begun then.
        """
        try:
            if self._node is not None:
                with self._timed() as reports:
                    reports[_ALONE] = await _published(self._node, is_terminated)
        except Exception as error:
            _log.warning(Event.CACHE_FAILED, what="publish", error=repr(error))
        began, start = self.context.clock.time(), self.context.clock.monotonic()
        try:
            await anyio.to_thread.run_sync(self._report, self._gathered)
        except Exception as error:
            _log.warning(Event.CACHE_FAILED, what="report", error=repr(error))
        elapsed_s = self.context.clock.monotonic() - start
        self.recorder.timing.record(Stage.CACHE_REPORT, start=began, duration_s=elapsed_s)

    @contextmanager
    def _timed(self) -> Generator[dict[str, Sequence[PartReport] | Exception]]:
        """Collects reports; the rows about them are those of the slowest node."""
        began = self.context.clock.time()
        reports: dict[str, Sequence[PartReport] | Exception] = {}
        yield reports
        self._gathered = reports
        told = [parts for parts in reports.values() if not isinstance(parts, Exception)]
        pack_s = max((sum(part.pack_s for part in parts) for parts in told), default=0.0)
        publish_s = max((sum(part.publish_s for part in parts) for parts in told), default=0.0)
        timing = self.recorder.timing
        timing.record(Stage.CACHE_PACK, start=began, duration_s=pack_s)
        timing.record(Stage.CACHE_PUBLISH, start=began + pack_s, duration_s=publish_s)

    def _report(self, reports: Reports) -> None:
        update = max(0, committed_update(Chain(self.context.root).read()))
        detail: dict[str, JsonValue] = {}
        outcomes: dict[str, str] = {}
        for address, found in reports.items():
            if isinstance(found, Exception):
                detail[address] = {"outcome": "failed", "problem": repr(found)}
                outcomes[address] = "failed"
                continue
            for report in found:
                name = _named(address, report.part)
                detail[name] = cast("JsonValue", asdict(report))
                outcomes[name] = report.outcome
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
        self.recorder.lifecycle.record(Event.CACHE_PUBLISHED, parts=outcomes)
        publishing.discard(self.root)

    def _order(self, model: Path) -> CacheOrder:
        output, python = self.context.spec.output, self.context.spec.rollout.engine_python
        assert output.compiler_cache is not None
        return CacheOrder(
            root=self.root,
            place=output.compiler_cache,
            model=model,
            layout=self._layout(),
            wait_s=output.cache_wait,
            publishers=output.cache_publishers,
            engine_python=None if python is None else str(python),
            by=f"{self.context.spec.name}, attempt {self.context.attempt.number}",
        )

    def _layout(self) -> dict[str, JsonValue]:
        spec, topology = self.context.spec, self.context.plan.topology
        return {
            "trainer_ranks": topology.trainer_ranks,
            "context": topology.context,
            "backend": spec.core.backend,
            "compile": spec.core.compile,
            "dtype": spec.model.dtype,
            "engine": spec.rollout.engine,
            "engine_tensor": spec.rollout.tensor,
        }


def _named(address: str, part: str) -> str:
    return f"{address}/{part}" if address else part


async def _restored(node: NodeCache) -> Restored:
    """In a thread, which a cancellation of ours reaches while it asks an interpreter."""
    found: list[Restored | Exception] = []

    async def pass_on() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not found:
                node.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pass_on)
        try:
            found.append(await anyio.to_thread.run_sync(node.restore))
        except Exception as error:  # told as it is, not as a group of one
            found.append(error)
        tasks.cancel_scope.cancel()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


async def _published(node: NodeCache, is_terminated: Callable[[], bool]) -> list[PartReport]:
    async def cancel() -> None:
        node.cancel()

    if is_terminated():
        node.cancel()
    async with once(is_terminated, cancel):
        reports = await anyio.to_thread.run_sync(node.publish)
    return reports
