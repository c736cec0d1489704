"""P9: what telemetry costs an update, as a share of a 0.15 s update.

Writes what one update of the laptop task writes (stages, metric rows, contracts, lifecycle, log
lines, an occupancy sample), many times over, and counts CPU seconds of the whole process, flusher
and W&B threads included. Variants are interleaved with an empty loop. JSON on standard output.

    python benchmarks/bench_telemetry.py [--updates 500] [--rounds 5] [--wandb]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runtime.clock import SystemClock
from runtime.telemetry import log
from runtime.telemetry.events import Event
from runtime.telemetry.recorder import Recorder
from runtime.telemetry.rows import Owner
from runtime.telemetry.sinks import Axis, WandbSettings
from runtime.telemetry.timing import Stage

UPDATE_S = 0.15
"""A warm update of the laptop task."""
STAGES = (Stage.ROLLOUT_WAIT, Stage.TRAIN, Stage.STAGE_STATE, Stage.PUBLISH, Stage.BOUNDARY)
TRAIN = {f"train/metric_{i}": i * 0.37 for i in range(24)} | {
    f"publication/metric_{i}": i * 0.01 for i in range(3)
}
ROLLOUT = {f"rollout/metric_{i}": i * 0.21 for i in range(12)}
SAMPLE = {f"value_{i}": i for i in range(14)}


def one_update(recorder: Recorder, update: int, tick: Callable[[], bool]) -> None:
    """All that a session records per update."""
    for stage in STAGES:
        with recorder.timing.stage(stage, update=update):
            pass
    recorder.metrics.log(Axis.TRAIN, update, TRAIN)
    recorder.metrics.log(Axis.ROLLOUT, update, ROLLOUT)
    for name in ("optimizer", "policy_agreement", "publication"):
        recorder.contracts.write(name, update=update, holds=True, values=ROLLOUT)
    for event in (Event.GROUP_REQUEUED, Event.UPDATE_FINISHED):
        log.get_logger().info(event, update=update, elapsed_s=0.1, policy=f"e1.u{update}")
    for event in (Event.PUBLICATION_STARTED, Event.PUBLICATION_COMMITTED):
        recorder.lifecycle.record(event, update=update, policy=f"e1.u{update}")
    tick()


def measure(updates: int, tracking: WandbSettings | None) -> float:
    """CPU seconds per update of this process; the W&B service's own are left out."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        log.configure(root / "session.log", run="bench", attempt=1, role="session", epoch=1)
        recorder = Recorder(
            root, Owner(attempt=1, epoch=1), clock=SystemClock(), tracking=tracking
        ).start()
        sampler = recorder.sampler(lambda: SAMPLE, interval_s=UPDATE_S / 100)
        if tracking is not None:
            recorder.metrics.log(Axis.TRAIN, 0, TRAIN)
            while recorder.tracking_sent == 0:  # its start is paid once, not per update
                time.sleep(0.05)
        before = time.process_time()
        for update in range(1, updates + 1):
            one_update(recorder, update, sampler.tick)
        recorder.close()
        return (time.process_time() - before) / updates


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wandb", action="store_true", help="also with real offline W&B")
    args = parser.parse_args()
    variants: dict[str, WandbSettings | None] = {"local": None}
    if args.wandb:
        variants["local + wandb offline"] = WandbSettings(mode="offline", project="p", name="n")
    seen: dict[str, list[float]] = {name: [] for name in variants}
    load = os.getloadavg()[0]
    for _ in range(args.rounds):
        for name, tracking in variants.items():
            seen[name].append(measure(args.updates, tracking))
    print(
        json.dumps(
            {
                "measure": "P9",
                "limit_share": 0.01,
                "update_s": UPDATE_S,
                "updates": args.updates,
                "rounds": args.rounds,
                "load_before": load,
                "python": platform.python_version(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "variants": {
                    name: {
                        "cpu_s_per_update": statistics.median(values),
                        "spread_s": [min(values), max(values)],
                        "share_of_update": statistics.median(values) / UPDATE_S,
                    }
                    for name, values in seen.items()
                },
            },
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
