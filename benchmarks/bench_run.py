"""The whole system on the laptop task: P1 (a), P3 and P13 of one run per seed.

    python -m benchmarks.bench_run --seeds 1 --flow --out run.json

Each seed is a real run (guard, Ray, engine, trainer, verifiers; with ``--flow`` the Prefect flow
too)
in a folder of its own. CPU seconds are those of every process of the run, Ray's own included, by
the kernel's accounting. Compare with ``bare_loop`` and ``trl_side`` started in turn on the same
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from runtime.rundir import workflow
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import ATTEMPT_VARIABLE
from runtime.session.status import look

PRESET = Path(__file__).parent.parent / "configs/presets/laptop.toml"
WARM_UPDATE = 20
"""Figures per update are taken from here to the last commit's neighbourhood."""
POLL_S = 0.25


class CpuMeter:
    """CPU seconds of all processes of a run by kind, those that are gone included."""

    def __init__(self, attempts: Path, command: psutil.Process) -> None:
        self._ours = f"{attempts}/"
        self._command = command
        self._seen: dict[int, tuple[str, float]] = {}

    def read(self) -> dict[str, float]:
        """Sums by kind: flow, guard, session, trainer, engine, verifier, ray."""
        for process in psutil.process_iter():
            try:
                kind = self._kind(process)
                if kind is not None:
                    times = process.cpu_times()
                    self._seen[process.pid] = (kind, times.user + times.system)
            except psutil.Error:
                continue
        sums: dict[str, float] = {}
        for kind, seconds in self._seen.values():
            sums[kind] = sums.get(kind, 0.0) + seconds
        return sums

    def _kind(self, process: psutil.Process) -> str | None:
        if process.pid == self._command.pid:
            return "flow"
        line = process.cmdline()
        is_ours = any(part.startswith(self._ours) for part in line) or process.environ().get(
            ATTEMPT_VARIABLE, ""
        ).startswith(self._ours)
        if not is_ours or not line:
            return None
        text = " ".join(line[:4])
        for mark, kind in (
            ("session.guard", "guard"),
            ("session.driver", "session"),
            ("session.preparing", "preparing"),
            ("_RankActor", "trainer"),
            ("embedded", "engine"),
            ("rewards.worker", "verifier"),
        ):
            if mark in text:
                return kind
        return "ray"


def one_run(seed: int, folder: Path, *, with_flow: bool, sets: list[str]) -> dict[str, Any]:
    """Run one seed to its end."""
    root = RunRoot(folder / f"run-{seed}")
    flow = [] if with_flow else ["--detach"]
    command = [sys.executable, "-m", "flows.cli", "run", str(PRESET), *flow]
    chosen = [f'output.root="{root.path}"', f"seed={seed}", *sets]
    started = time.time()
    process = subprocess.Popen(
        [*command, *(f"--set={text}" for text in chosen)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    meter = CpuMeter(root.attempts, psutil.Process(process.pid))
    samples = list(_watch(root, meter, process, is_attached=with_flow))
    process.wait(120)
    return _figures(seed, root, started, samples)


def _watch(root: RunRoot, meter: CpuMeter, process: subprocess.Popen[bytes], *, is_attached: bool):
    while True:
        view = workflow.read(root)
        is_over = view is not None and view.state in ("complete", "failed")
        yield (0 if view is None else view.update, time.time(), meter.read())
        if is_over and (not is_attached or process.poll() is not None):
            return
        time.sleep(POLL_S)


def _rows(root: RunRoot, axis: str) -> list[dict[str, Any]]:
    lines = (root.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["axis"] == axis]


def _figures(
    seed: int, root: RunRoot, started: float, samples: list[tuple[int, float, dict[str, float]]]
) -> dict[str, Any]:
    status = look(root)
    train = _rows(root, "train/update")
    updates = [r for r in train if "train/elapsed_s/update" in r["values"]]
    warm = [r["values"]["train/elapsed_s/update"] for r in updates if r["step"] > WARM_UPDATE]
    first = next(s for s in samples if s[0] >= WARM_UPDATE)
    last = max((s for s in samples if s[0] < status.update), key=lambda s: s[0])
    count = last[0] - first[0]
    cpu = {k: (v - first[2].get(k, 0.0)) / count for k, v in last[2].items()}
    rewards = [
        (row["time"], row["values"]["rollout/reward_mean"])
        for row in _rows(root, "rollout/collection")
    ]
    reached = next((i for i in range(4, len(rewards)) if _mean_of_five(rewards, i) >= 0.9), None)
    parts = ("scoring", "forward_backward", "optimizer", "diagnostics")
    work = [
        sum(row["values"].get(f"train/elapsed_s/{part}", 0.0) for part in parts)
        for row in updates
        if row["step"] > WARM_UPDATE
    ]
    return {
        "seed": seed,
        "state": status.state,
        "updates": status.update,
        "first_update_s": round(rewards[0][0] - started, 2),
        "done_s": round(samples[-1][1] - started, 2),
        "reached_0_9": None
        if reached is None
        else {"update": reached + 1, "wall_s": round(rewards[reached][0] - started, 2)},
        "reward_last_10": round(statistics.fmean(x for _, x in rewards[-10:]), 4),
        "wall_s_per_update_median": round(statistics.median(warm), 4),
        "trainer_work_s_per_update_median": round(statistics.median(work), 4),
        "cpu_s_per_update": round(sum(cpu.values()), 4),
        "cpu_s_per_update_by": {k: round(v, 4) for k, v in sorted(cpu.items())},
        "cpu_s_total_by": {k: round(v, 2) for k, v in sorted(samples[-1][2].items())},
        "stages_s": _stages(root),
    }


def _mean_of_five(rewards: list[tuple[float, float]], at: int) -> float:
    return statistics.fmean(reward for _, reward in rewards[at - 4 : at + 1])


def _stages(root: RunRoot) -> dict[str, float]:
    """Median seconds of each stage, and the start's own."""
    by_name: dict[str, list[float]] = {}
    for line in root.driver_timing.read_text().splitlines():
        row = json.loads(line)
        by_name.setdefault(row["name"], []).append(row["duration_s"])
    return {name: round(statistics.median(found), 4) for name, found in by_name.items()}


def main() -> None:
    """Read the command line, run all seeds, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--flow", action="store_true", help="attach the Prefect flow")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="mpb-") as folder:
        results = [
            one_run(seed, Path(folder), with_flow=args.flow, sets=args.sets)
            for seed in range(args.first, args.first + args.seeds)
        ]
    answer = {"load_before": load, "cores": os.cpu_count(), "flow": args.flow, "runs": results}
    text = json.dumps(answer, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
