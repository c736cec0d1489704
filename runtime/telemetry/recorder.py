"""One process's telemetry put together: writers of a run directory, flusher, sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from runtime.clock import Clock
from runtime.telemetry.contracts import ContractLog
from runtime.telemetry.lifecycle import LifecycleLog
from runtime.telemetry.occupancy import OccupancySampler, Snapshot
from runtime.telemetry.rows import Flusher, Owner, RowWriter
from runtime.telemetry.sinks import LocalSink, MultiSink, TrackingSink, WandbSettings, WandbSink
from runtime.telemetry.timing import StageTimer


class Recorder:
    """What the session records with. One per process and output root.

    Attributes:
        metrics: axis rows, to ``metrics.jsonl`` and W&B.
        timing: ``driver_timing.jsonl``.
        lifecycle: ``pipeline_lifecycle.jsonl``.
        contracts: ``contracts/<name>.jsonl``.
    """

    def __init__(
        self, root: Path, owner: Owner, *, clock: Clock, tracking: WandbSettings | None = None
    ) -> None:
        self._root = root
        self._owner = owner
        self._clock = clock
        self._flusher = Flusher()
        self._wandb = None if tracking is None else WandbSink(root, tracking, owner)
        self._occupancy_rows = self.open_rows(root / "pipeline_occupancy.jsonl")
        self.timing = StageTimer(self.open_rows(root / "driver_timing.jsonl"), clock=clock)
        self.lifecycle = LifecycleLog(self.open_rows(root / "pipeline_lifecycle.jsonl"))
        self.contracts = ContractLog(root / "contracts", self.open_rows, sink=self._wandb)
        sinks: list[TrackingSink] = [LocalSink(self.open_rows(root / "metrics.jsonl"))]
        if self._wandb is not None:
            sinks.append(self._wandb)
        self.metrics: TrackingSink = MultiSink(sinks)

    def start(self) -> Self:
        """Start the flusher's thread and W&B's; returns at once."""
        self._flusher.start()
        if self._wandb is not None:
            self._wandb.start()
        return self

    def open_rows(self, path: Path) -> RowWriter:
        """A writer of one more file (``rollout_errors.jsonl``), flushed with the others."""
        return self._flusher.add(RowWriter(path, self._owner, clock=self._clock))

    def sampler(self, snapshot: Snapshot, *, interval_s: float = 1.0) -> OccupancySampler:
        """The sampler of ``pipeline_occupancy.jsonl``; the caller runs it in a task of its own."""
        return OccupancySampler(
            self._occupancy_rows, snapshot, clock=self._clock, interval_s=interval_s
        )

    @property
    def tracking_sent(self) -> int:
        """Rows W&B took so far; 0 without it."""
        return 0 if self._wandb is None else self._wandb.sent

    def flush(self) -> None:
        """Write all rows now; blocks on the disk."""
        self._flusher.flush()

    def close(self, *, tracking_timeout_s: float | None = None) -> None:
        """Finish the sinks and write the rest, each within its own deadline. Idempotent.

        Args:
            tracking_timeout_s: how long W&B may take, where a grace period leaves less than its own
                limit; local rows are written first either way.
        """
        self._flusher.flush()
        if self._wandb is not None:
            self._wandb.finish(tracking_timeout_s)
        self.metrics.finish()
        self._flusher.close()
