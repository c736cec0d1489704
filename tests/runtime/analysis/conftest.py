"""A run directory as a real run leaves it, by the real writers and a clock of our own."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from runtime.clock import ManualClock
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import EpochRecord
from runtime.telemetry.contracts import ContractLog
from runtime.telemetry.occupancy import OccupancySampler
from runtime.telemetry.protocol import Axis
from runtime.telemetry.rows import Owner, RowWriter
from runtime.telemetry.sinks import LocalSink
from runtime.telemetry.timing import Stage, StageTimer


class SyntheticRun:
    """Writes epochs of a made-up run; ``learn`` adds updates of one epoch."""

    def __init__(self, root: Path, *, seed: int = 0) -> None:
        self.root = root
        self.clock = ManualClock(1_790_000_000.0)
        self.random = random.Random(seed)
        self.epoch = 0

    def begin_epoch(self, restored: int | None) -> None:
        self.epoch += 1
        chain = Chain(RunRoot.of(self.root))
        RunRoot.of(self.root).create()
        chain.read()
        chain.append(
            EpochRecord(
                epoch=self.epoch,
                time=self.clock.time(),
                attempt=self.epoch,
                host="h",
                pid=1,
                boot_id="b",
                started=0.0,
                reason="test",
                restored=None if restored is None else f"e{max(1, self.epoch - 1)}.u{restored}",
                restored_seq=None if restored is None else 0,
                lease_s=30.0 if self.epoch == 1 else None,
            )
        )

    def learn(self, first: int, last: int, *, evaluate_every: int = 20) -> None:
        owner = Owner(attempt=self.epoch, epoch=self.epoch)
        made: list[RowWriter] = []

        def rows(path: Path) -> RowWriter:
            made.append(RowWriter(path, owner, clock=self.clock))
            return made[-1]

        sink = LocalSink(rows(self.root / "metrics.jsonl"))
        timer = StageTimer(rows(self.root / "driver_timing.jsonl"), clock=self.clock)
        contracts = ContractLog(self.root / "contracts", rows)
        state: dict[str, float] = {}
        sampler = OccupancySampler(
            rows(self.root / "pipeline_occupancy.jsonl"), lambda: state, clock=self.clock
        )
        started = self.clock.monotonic()
        for update in range(first, last + 1):
            self._update(update, sink, timer, contracts)
            state |= {
                "generation_active_calls": self.random.randint(20, 64),
                "generation_admission_waiters": self.random.randint(0, 12),
                "buffered_groups": self.random.randint(0, 32),
                "engines_healthy": 2,
                "kv_usage": self.random.uniform(0.2, 0.7),
            }
            sampler.tick()
            if update % 15 == 0:
                sink.log(Axis.ERRORS, self.clock.monotonic() - started, self._errors(update))
            if update % evaluate_every == 0:
                with timer.stage(Stage.EVALUATE, update=update):
                    self.clock.advance(0.4)
                sink.log(Axis.EVALUATION, update, self._evaluation(update))
        for writer in made:
            writer.close()

    def _update(
        self, update: int, sink: LocalSink, timer: StageTimer, contracts: ContractLog
    ) -> None:
        noise = self.random.gauss
        reward = 1 / (1 + math.exp(-(update - 60) / 22)) + noise(0, 0.025)
        with timer.stage(Stage.ROLLOUT_WAIT, update=update):
            self.clock.advance(abs(noise(0.12, 0.05)))
        with timer.stage(Stage.TRAIN, update=update):
            self.clock.advance(abs(noise(0.3, 0.02)) + (1.5 if update == 1 else 0))
        publication_start = self.clock.time()
        with timer.stage(Stage.PUBLISH, update=update):
            self.clock.advance(abs(noise(0.05, 0.01)))
        if update % 10 == 0:
            with timer.stage(Stage.STAGE_STATE, update=update):
                self.clock.advance(0.03)
            timer.record(Stage.COMMIT, start=publication_start, duration_s=0.9, update=update)
        sink.log(
            Axis.ROLLOUT,
            update,
            {
                "rollout/reward_mean": min(1.0, max(0.0, reward)),
                "rollout/length_mean": 5.2 + noise(0, 0.15) - 0.6 * reward,
                "rollout/cap_share": max(0.0, 0.3 * (1 - reward) + noise(0, 0.02)),
                "rollout/mixed_groups": max(2, int(30 * (1 - abs(2 * reward - 1)))),
                "rollout/equal_groups": 32 - max(2, int(30 * (1 - abs(2 * reward - 1)))),
                "rollout/staleness_mean": abs(noise(0.8, 0.3)),
                "rollout/staleness_max": self.random.choice([1, 1, 1, 2, 2, 3, 4]),
                "rollout/num_groups": 32,
                "rollout/num_tokens": 1330 + self.random.randint(-90, 90),
                "rollout/tokens_per_s": 3100 + noise(0, 180),
            },
        )
        sink.log(
            Axis.TRAIN,
            update,
            {
                "train/loss": noise(0, 0.004),
                "train/policy_loss": noise(0, 0.004),
                "train/policy_grad_norm": 0.4 + abs(noise(0, 0.1)) if update % 5 == 0 else None,
                "train/total_grad_norm": 0.4 + abs(noise(0, 0.1)),
                "train/kl_train_behaviour": abs(noise(0.004, 0.002)),
                "train/entropy": 1.6 - reward + noise(0, 0.03),
                "train/tis/clip_share": abs(noise(0.01, 0.004)),
                "train/agreement/gap_mean": abs(noise(2e-6, 4e-7)),
                "train/agreement/gap_p99": abs(noise(9e-6, 1e-6)),
                "publication/elapsed_s": abs(noise(0.05, 0.008)),
                "publication/pause_s": abs(noise(0.02, 0.004)),
                "publication/bytes": 1_200_000,
            },
        )
        contracts.write(
            "policy_agreement", update=update, holds=True, values={"limit": 1e-4, "gap_mean": 2e-6}
        )

    def _errors(self, update: int) -> dict[str, float]:
        return {
            "errors/transport_groups": update // 40,
            "errors/overload_groups": 0,
            "errors/unavailable_groups": 0,
            "errors/timeout_groups": update // 90,
            "errors/completed_group_attempts": update * 32,
        }

    def _evaluation(self, update: int) -> dict[str, float]:
        mean = min(0.99, max(0.02, 1 / (1 + math.exp(-(update - 58) / 22))))
        return {
            "evaluation/held_out/mean": mean,
            "evaluation/held_out/mean_low": mean - 0.04,
            "evaluation/held_out/mean_high": min(1.0, mean + 0.04),
            "evaluation/held_out/pass_at_1": mean,
        }

    def write_workflow(self, update: int, **fields: object) -> None:
        record = {
            "schema_version": 1,
            "run": "reverse-letters",
            "state": "training",
            "activity": "running",
            "attempt": self.epoch,
            "epoch": self.epoch,
            "update": update,
            "expected": {"updates": 200, "checkpoints": 20, "evaluations": 10, "exports": 1},
            "seen": {
                "updates": update,
                "checkpoints": update // 10,
                "evaluations": update // 20,
                "exports": 0,
            },
            "outstanding": [],
            "failure": None,
            "heartbeat": {"count": 7, "time": self.clock.time(), "every_s": 2.0},
        }
        (self.root / "workflow.json").write_text(json.dumps(record | fields))
        (self.root / "plan.json").write_text(json.dumps({"schema_version": 1, "name": "x"}))


@pytest.fixture(scope="session")
def synthetic_run() -> type[SyntheticRun]:
    return SyntheticRun
