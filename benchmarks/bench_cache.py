"""Compiler caches: what a first step costs cold, and with a cache that another node published.

A trainer with ``core.compile`` makes its first steps in a process of its own, with an empty cache
folder; what was compiled is packed, published to a folder, restored into another one, and a second
process makes the same steps there. Ours alone is timed inside: packing, publishing, restoring.

    python -m benchmarks.bench_cache --rounds 3 --out cache.json
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runtime.caches.key import key_of
from runtime.caches.parts import environment
from runtime.caches.publishing import Publisher, restore
from runtime.caches.stores import FolderStore
from runtime.clock import SystemClock
from runtime.recipes import laptop


def steps(model: str) -> dict[str, float]:
    """In a process of its own: the trainer's first score and step, and the step after."""
    import anyio
    import numpy as np

    from runtime.trainer.local import LocalGroup
    from runtime.trainer.protocol import Sequence, TrainBatch
    from runtime.trainer.settings import TrainerSettings

    def sequence(i: int) -> Sequence:
        return Sequence(
            tokens=np.arange(1 + i % 7, 41 + i % 7, dtype=np.int32),
            prompt_len=20,
            logprobs=np.full(20, -5.0, np.float32),
            mask=np.ones(20, np.float32),
            advantage=1.0 - 2 * (i % 2),
            span_ends=np.array([20], np.int32),
            span_updates=np.array([-1], np.int32),
            prefill_update=-1,
            group=0,
            is_equal=False,
        )

    async def run() -> dict[str, float]:
        trainer = LocalGroup(TrainerSettings(compile=True, max_mean_logprob_gap=1e9))
        await trainer.load(model)
        taken: dict[str, float] = {}
        for name, update in (("first_s", 1), ("second_s", 2)):
            began = time.perf_counter()
            batch = TrainBatch(
                update=update,
                sequences=tuple(sequence(i) for i in range(8)),
                consumed_digest=f"{update}",
            )
            await trainer.train_step(batch)
            taken[name] = time.perf_counter() - began
        await trainer.shutdown()
        return taken

    return anyio.run(run)


def timed(model: Path, root: Path) -> dict[str, float]:
    """The steps in a fresh process whose compilers keep their caches below ``root``."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_cache", "--steps", str(model)],
        env=os.environ | environment(root),
        check=True,
        capture_output=True,
        text=True,
    )
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of children that have ended, compilers too
    return json.loads(done.stdout.splitlines()[-1]) | {"cpu_s": cpu_s}


def one_round(model: Path, folder: Path) -> dict[str, Any]:
    """Cold, publish, restore, warm."""
    store, key = FolderStore(folder / "store"), key_of(model, {"compile": True})
    cold = timed(model, folder / "cold")
    reports = Publisher(
        root=folder / "cold", store=store, key=key, by="bench", publishers=2, wait_s=60.0,
        clock=SystemClock(),
    ).publish()  # fmt: skip
    assert {report.outcome for report in reports} == {"published"}
    began = time.perf_counter()
    restored = restore(folder / "warm", store, key, wait_s=60.0)
    restore_s = time.perf_counter() - began
    assert set(restored.parts) == {report.part for report in reports}
    shutil.rmtree(folder / "cold")  # a path that somebody wrote down leads nowhere now
    warm = timed(model, folder / "warm")
    return {
        "cold": cold,
        "warm": warm,
        "pack_s": sum(report.pack_s for report in reports),
        "publish_s": sum(report.publish_s for report in reports),
        "restore_s": restore_s,
        "archive_bytes": sum(report.num_bytes for report in reports),
        "files": sum(report.num_files for report in reports),
    }


def main() -> int:
    """Run the rounds, or (inside) the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps:
        print(json.dumps(steps(given.steps)))
        return 0
    with tempfile.TemporaryDirectory() as made:
        model = laptop.make(
            Path(made) / "laptop", seed=1, prompts=8, holdout=8, warm_up_until=None
        ).model
        rounds = [one_round(model, Path(tempfile.mkdtemp(dir=made))) for _ in range(given.rounds)]
    answer = {
        "load": os.getloadavg()[0],
        "cold_first_s": statistics.median(r["cold"]["first_s"] for r in rounds),
        "warm_first_s": statistics.median(r["warm"]["first_s"] for r in rounds),
        "rounds": rounds,
    }
    text = json.dumps(answer, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
