"""P11: a whole run on one GPU, two or four: seconds per update, tokens/s, publications, agreement.

A run like any other (guard, session, Ray, trainer ranks, SGLang engines) with a model of random
weights (``gpu_task``). Layouts:

    one          trainer and engine share one GPU; ipc
    one-disk     the same; disk
    one-sleep    the same as ``one``; the engine gives its memory back for each update
    one-preset   ``configs/presets/one-gpu.toml`` itself, with what a user sets in it
    two          one trainer rank, one engine; NCCL broadcast
    two-two      two trainer ranks (FSDP2), two engines; NCCL broadcast
    two-wide     two trainer ranks, one engine of tensor parallel 2; NCCL broadcast

``--kill-at N`` kills an engine's server after update N and looks for its return, ``--stop-at N``
stops it, ``--kill-during-broadcast N`` kills it while all engines wait for a bucket
(``gpu_strike``); such a run ends as "back" soon after every engine that died is verified again,
whatever updates are left. ``--cpu`` tries everything on a CPU with a tiny model and gloo. Figures
are written every few seconds; the run and all its processes are gone when the command returns.

    python -m benchmarks.gpu_run --layout one --engine-python /opt/sglang/bin/python --out one.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_memory import MemoryWatch, sleep_figures
from benchmarks.gpu_processes import Processes
from benchmarks.gpu_strike import Strike
from benchmarks.gpu_task import PRESET, Task, make, of_preset
from configs.load import LoadedRun, load_run
from configs.run import RunSpec
from runtime.launch.start import start_run
from runtime.publication.decision import Decision, read_decisions
from runtime.rundir import workflow
from runtime.rundir.layout import RunRoot

POLL_S = 0.2
WRITE_EVERY_S = 3.0
LEAVE_S = 45.0
"""For a run's processes to end by themselves once it has."""
LOG_CHARS = 6000
"""Kept of each log of a run that did not reach its end."""
WARM = 4
"""Updates left out of medians: groups, kernels and buffers are made in them."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus": 1, "colocated": True, "transport": "ipc"},
    "one-disk": {"gpus": 1, "colocated": True, "transport": "disk"},
    "one-sleep": {"gpus": 1, "colocated": True, "transport": "ipc", "sleep": True},
    "one-preset": {"gpus": 1},
    "two": {"gpus": 2, "colocated": False, "transport": "broadcast"},
    "two-two": {"gpus": 4, "engines": 2, "colocated": False, "transport": "broadcast"},
    "two-wide": {"gpus": 4, "tensor": 2, "colocated": False, "transport": "broadcast"},
}  # fmt: skip


def task_of(arguments: argparse.Namespace) -> Task:
    """The run a command line asks for."""
    task = Task(
        engine_python=arguments.engine_python,
        updates=arguments.updates,
        groups=arguments.groups,
        compile=arguments.compile,
        **LAYOUTS[arguments.layout],
    )
    if task.colocated:
        task = replace(task, engine_args={"mem_fraction_static": 0.4})
    if not arguments.cpu:
        return task
    transport = "disk" if task.transport == "ipc" and task.engine_python else task.transport
    return replace(
        task, shape="tiny", gpus=0, tensor=1, groups=2, samples=4, prompt_tokens=16,
        response_tokens=16, max_gap=1e-3, transport=transport,
        engine_args={"max_total_tokens": 8192},
    )  # fmt: skip


def run_of(folder: Path, task: Task, layout: str) -> LoadedRun:
    """Everything a run needs, below ``folder``."""
    if layout == "one-preset":
        return load_run(PRESET, of_preset(folder, task))
    return load_run(make(folder, task, name=folder.name))


class Watched:
    """A run from its start to its end, and the figures of it so far."""

    def __init__(
        self,
        loaded: LoadedRun,
        layout: str,
        processes: Processes,
        strike: Strike | None,
        out: Path | None,
    ) -> None:
        self._layout = layout
        self._spec = loaded.spec
        self._root = RunRoot.of(loaded.spec.output.root)
        self._processes = processes
        self._strike = strike
        self._out = out
        self._memory = MemoryWatch()
        self._began, self._started_at = time.monotonic(), time.time()
        self._verdict = "running"
        self._written = 0.0
        self._killed = 0
        start_run(loaded)

    def watch(self, deadline_s: float) -> dict[str, Any]:
        """Until it ends or ``deadline_s`` is over; nothing of it lives then."""
        root = self._root.path
        with self._memory:
            try:
                while self._verdict == "running":
                    time.sleep(POLL_S)
                    self._look(deadline_s)
                if self._verdict in ("complete", "failed"):
                    self._killed = self._processes.end(wait_s=LEAVE_S)
            finally:
                self._killed += self._processes.stop(wait_s=LEAVE_S / 3)
        if self._out is not None and self._verdict not in ("complete", "back"):
            self._out.with_suffix(".logs").write_text(_last_words(root))
        # Several runs of a machine would fill its disk with states.
        shutil.rmtree(root / "checkpoints", ignore_errors=True)
        return self.write()

    def _look(self, deadline_s: float) -> None:
        view = workflow.read(self._root)
        took_s = time.monotonic() - self._began
        if view is not None and view.state in ("complete", "failed"):
            self._verdict = view.state
        elif took_s > deadline_s:
            self._verdict = "over its deadline"
        elif self._strike is not None and view is not None:
            self._strike.look(view.update)
        if took_s - self._written > WRITE_EVERY_S:
            self._written = took_s
            self._processes.look()
            told = self.write()["strike"]
            if told is not None and told.get("is_back") and self._verdict == "running":
                self._verdict = "back"

    def write(self) -> dict[str, Any]:
        """Figures so far, as they stand in the file afterwards."""
        view = workflow.read(self._root)
        rows = _rows(self._root.path / "pipeline_lifecycle.jsonl")
        decisions = read_decisions(self._root.path / "publications.jsonl")
        found: dict[str, Any] = {
            "layout": self._layout,
            "state": self._verdict,
            "update": None if view is None else view.update,
            "step": None if view is None else view.step,
            "failure": None
            if view is None or view.failure is None
            else view.failure.model_dump(mode="json"),
            "wall_s": round(time.monotonic() - self._began, 1),
            "first_s": self._firsts(rows),
            "killed_at_the_end": self._killed,
            "peak_gpu_mib": self._memory.peak,
            **figures(self._root, self._spec, decisions),
            "sleep": sleep_figures(rows, self._memory.samples),
            "strike": None if self._strike is None else self._strike.figures(rows, decisions),
        }
        if self._out is not None:
            beside = self._out.with_suffix(".part")
            beside.write_text(json.dumps(found, indent=1) + "\n")
            beside.replace(self._out)
        return found

    def _firsts(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Seconds from the start to the first of each event, and to the first updates."""
        found: dict[str, float] = {}
        for row in rows:
            found.setdefault(row["event"], round(row["time"] - self._started_at, 1))
        for row in _rows(self._root.path / "metrics.jsonl"):
            if row["axis"] == "train/update" and row["values"].get("train/loss") is not None:
                found["last update"] = round(row["time"] - self._started_at, 1)
                found.setdefault("first update", found["last update"])
        return found


def figures(root: RunRoot, spec: RunSpec, decisions: list[Decision]) -> dict[str, Any]:
    """Medians after the first updates, from the run's own files."""
    rows = _rows(root.path / "metrics.jsonl")
    train = [r["values"] for r in rows if r["axis"] == "train/update"][WARM:]
    rollout = [r["values"] for r in rows if r["axis"] == "rollout/collection"][WARM:]
    decisions = decisions[WARM:]
    gpus = max(spec.launch.gpus_per_replica, 1)
    tokens = statistics.median([v["rollout/num_tokens"] for v in rollout] or [0.0])
    seconds = _median(train, "train/elapsed_s/update")
    samples = spec.rollout.groups_per_collection * spec.rollout.samples_per_prompt
    sent = _median([d.stages_s for d in decisions], "transfer")
    trained = tokens + samples * spec.data.max_prompt_tokens
    return {
        "samples_per_update": samples,
        "s_per_update": seconds,
        "s_per_update_all": [round(v["train/elapsed_s/update"], 3) for v in train
                             if "train/elapsed_s/update" in v][-40:],
        "generated_tokens_per_s_per_gpu": round(tokens / seconds / gpus, 1) if seconds else None,
        "trained_tokens_per_s_per_gpu": round(trained / seconds / gpus, 1) if seconds else None,
        "mixed_policy_samples": sum(v["rollout/mixed_policy_samples"] for v in rollout),
        "agreement": sorted({k: v for r in rows for k, v in r["values"].items()
                             if k.startswith(("contracts/policy_agreement", "train/agreement"))
                             }.items()),
        "times": {
            key: _median(train, key)
            for key in sorted({k for v in train for k in v if "elapsed_s" in k})
        },
        "publications": {
            "num": len(decisions),
            "num_bytes": decisions[-1].num_bytes if decisions else 0,
            "transfer_gb_per_s": round(decisions[-1].num_bytes / sent / 1e9, 2) if sent else None,
            "pause_s": _median([{"p": d.pause_s} for d in decisions], "p"),
            "stages_s": {
                stage: _median([d.stages_s for d in decisions], stage)
                for stage in (decisions[-1].stages_s if decisions else {})
            },
            "pauses": sorted({v.pause for d in decisions for v in d.verified}),
            "failed": [f.model_dump() for d in decisions for f in d.failed],
        },
    }  # fmt: skip


def _median(rows: list[Any], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return round(statistics.median(values), 5) if values else None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a file that may still grow."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _last_words(root: Path) -> str:
    """The ends of all logs of a run."""
    return "".join(
        f"==> {path.relative_to(root)}\n{path.read_text(errors='replace')[-LOG_CHARS:]}\n"
        for path in sorted(root.rglob("*.log*"))
        if path.is_file()
    )


def _strike(arguments: argparse.Namespace, folder: Path, processes: Processes) -> Strike | None:
    asked = {
        "kill": arguments.kill_at,
        "stop": arguments.stop_at,
        "broadcast": arguments.kill_during_broadcast,
    }
    for kind, at in asked.items():
        if at is not None:
            strike = Strike(kind=kind, at=at, processes=processes)  # pyright: ignore[reportArgumentType]
            strike.prepare(folder / "faults")
            return strike
    return None


def main() -> None:
    """Run one layout and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="one")
    parser.add_argument("--engine-python", default="", help="empty: the embedded engine")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    strikes = parser.add_mutually_exclusive_group()
    strikes.add_argument("--kill-at", type=int)
    strikes.add_argument("--stop-at", type=int)
    strikes.add_argument("--kill-during-broadcast", type=int)
    parser.add_argument("--deadline", type=float, default=240.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/milepost-gpu"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run is taken along
    folder = arguments.folder / f"{arguments.layout}-{os.getpid()}"
    loaded = run_of(folder, task_of(arguments), arguments.layout)
    processes = Processes(folder / "run")
    strike = _strike(arguments, folder, processes)
    watched = Watched(loaded, arguments.layout, processes, strike, arguments.out)
    sys.stdout.write(json.dumps(watched.watch(arguments.deadline), indent=1) + "\n")


if __name__ == "__main__":
    main()
