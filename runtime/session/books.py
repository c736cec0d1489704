"""What a session writes down about its work: metrics, contracts, rollout files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from runtime.data.collections import write_collection
from runtime.data.samples import Collection
from runtime.errors import StoreError
from runtime.publication.decision import Decision
from runtime.session.context import Context
from runtime.session.ends import End
from runtime.session.view import SessionView
from runtime.telemetry.events import Event
from runtime.telemetry.log import get_logger
from runtime.telemetry.protocol import Axis
from runtime.telemetry.recorder import Recorder
from runtime.trainer.protocol import TrainMetrics

_log = get_logger()
_AGREEMENT = "agreement/"
_AGAIN_S = (0.5, 2.0)
"""Pauses before a rollout file is tried again: a disk may be full for a moment only."""
_OPTIMIZER = (
    "mixed_groups", "equal_groups", "policy_loss", "policy_grad_norm", "total_grad_norm",
    "parameter_change_norm", "skipped_steps", "policy_gradient_expected",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Books:
    """One session's bookkeeping. Nothing here can end a run."""

    context: Context
    recorder: Recorder
    view: SessionView
    tasks: TaskGroup
    """Where rollout files are written, beside training."""
    _collected_at: float | None = None
    _num_writing: int = 0
    _written: anyio.Event = field(default_factory=anyio.Event)

    def trained(self, collection: Collection, update: int, metrics: TrainMetrics) -> None:
        """One collection became an update."""
        values = dict(metrics.values)
        rollout = collection_figures(collection)
        now = self.context.clock.monotonic()
        if self._collected_at is not None:
            elapsed = max(now - self._collected_at, 1e-9)
            rollout["rollout/tokens_per_s"] = rollout["rollout/num_tokens"] / elapsed
            values["elapsed_s/update"] = elapsed
        self._collected_at = now
        self.recorder.metrics.log(Axis.ROLLOUT, collection.id, rollout)
        self.recorder.metrics.log(
            Axis.TRAIN, update, {f"train/{name}": value for name, value in values.items()}
        )
        self._contracts(update, values)
        self.view.detail.update(
            reward_mean=round(rollout["rollout/reward_mean"], 4),
            staleness_mean=round(rollout["rollout/staleness_mean"], 3),
            tokens_per_s=round(rollout.get("rollout/tokens_per_s", 0.0), 1),
            collection=collection.id,
        )
        _log.info(
            Event.UPDATE_FINISHED,
            update=update,
            reward_mean=rollout["rollout/reward_mean"],
            loss=values.get("loss"),
        )

    def probed(self, update: int, figures: Mapping[str, float] | None) -> None:
        """Agreement was probed at a published policy; None: no engine answered."""
        self.recorder.contracts.write(
            "policy_agreement",
            update=update,
            holds=None if figures is None else True,
            values={"probe": True, **(figures or {"gap_mean": None})},
        )

    def published(self, update: int, decision: Decision) -> None:
        """A policy was published."""
        self.recorder.metrics.log(
            Axis.TRAIN,
            update,
            {
                "publication/elapsed_s": sum(decision.stages_s.values()),
                "publication/pause_s": decision.pause_s,
                "publication/bytes": float(decision.num_bytes),
                "publication/failed_engines": float(len(decision.failed)),
            },
        )

    def keep(self, collection: Collection) -> None:
        """Write the collection's samples, beside training."""
        if not self._num_writing:
            self._written = anyio.Event()
        self._num_writing += 1
        self.tasks.start_soon(self._write, collection)

    async def kept(self) -> None:
        """Wait until every collection given to ``keep`` is written, or has failed to be.

        Awaited before a commit's record: a run that goes on from there never comes by the
        collections before it again, so a file missing then would be missing for good.
        """
        while self._num_writing:
            await self._written.wait()

    def ending(self, end: End) -> None:
        """The loop is over."""
        event = Event.RUN_COMPLETED if end.is_complete else Event.RUN_STOPPED
        self.recorder.lifecycle.record(event, update=self.view.update, ended_by=end.by.value)
        self.view.moved(f"ending by {end.by}")

    async def _write(self, collection: Collection) -> None:
        stem = self.context.root.collection_stem(collection.id, self.context.epoch)
        path = stem.with_name(f"{stem.name}.parquet")
        try:
            for pause_s in (*_AGAIN_S, None):
                error = await anyio.to_thread.run_sync(_try_to_write, path, collection)
                if error is None:
                    return
                if pause_s is None:
                    # Evidence, not state: the run goes on, and the missing file is named.
                    _log.warning(Event.ROWS_DROPPED, file=str(path), error=str(error))
                    return
                await anyio.sleep(pause_s)
        finally:
            self._num_writing -= 1
            if not self._num_writing:
                self._written.set()

    def _contracts(self, update: int, values: Mapping[str, float]) -> None:
        agreement = {
            name.removeprefix(_AGREEMENT): value
            for name, value in values.items()
            if name.startswith(_AGREEMENT)
        }
        self.recorder.contracts.write(
            "policy_agreement",
            update=update,
            holds=True if agreement else None,
            values=agreement or {"gap_mean": None},
        )
        self.recorder.contracts.write(
            "optimizer",
            update=update,
            holds=True,
            values={name: values.get(name) for name in _OPTIMIZER},
        )


def _try_to_write(path: Path, collection: Collection) -> OSError | StoreError | None:
    """Write a collection's file; returns what was in the way."""
    try:
        path.parent.mkdir(exist_ok=True)
        write_collection(path, collection)
    except (OSError, StoreError) as error:
        return error
    return None


def collection_figures(collection: Collection) -> dict[str, float]:
    """Metrics of one collection under ``rollout/``. It has at least one group."""
    samples = [sample for group in collection.groups for sample in group.samples]
    rewards = [reward for group in collection.groups for reward in group.rewards]
    taken = collection.taken_at.update
    staleness = [taken - group.oldest.update for group in collection.groups]
    lengths = [len(sample.token_ids) for sample in samples]
    equal = sum(group.is_equal for group in collection.groups)
    return {
        "rollout/reward_mean": statistics.fmean(rewards),
        "rollout/length_mean": statistics.fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/cap_share": sum(s.finish == "length" for s in samples) / len(samples),
        "rollout/mixed_groups": float(len(collection.groups) - equal),
        "rollout/equal_groups": float(equal),
        "rollout/mixed_policy_samples": float(sum(s.is_mixed for s in samples)),
        "rollout/staleness_mean": statistics.fmean(staleness),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/num_groups": float(len(collection.groups)),
        "rollout/num_tokens": float(sum(lengths)),
    }
