"""P11: a whole run on one GPU, two or four: seconds per update, tokens/s, publications, agreement.

A run like any other (guard, session, Ray, trainer ranks, SGLang engines) with a model of random
weights (``gpu_task``). Layouts:

    one        trainer and engine share one GPU; ipc
    two        one trainer rank, one engine; NCCL broadcast
    two-two    two trainer ranks (FSDP2), two engines; NCCL broadcast
    two-wide   two trainer ranks, one engine of tensor parallel 2; NCCL broadcast

``--kill-at N`` kills an engine's server after update N and looks for its return. ``--cpu`` tries
everything on a CPU with a tiny model and gloo.

    python -m benchmarks.gpu_run --layout one --engine-python /opt/sglang/bin/python --out one.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_task import Task, make
from configs.load import load_run
from runtime.launch.start import start_run
from runtime.publication.decision import read_decisions
from runtime.rundir import workflow
from runtime.rundir.layout import RunRoot

POLL_S = 0.5
WARM = 4
"""Updates left out of medians: groups, kernels and buffers are made in them."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"gpus": 1, "colocated": True, "transport": "ipc"},
    "one-disk": {"gpus": 1, "colocated": True, "transport": "disk"},
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


def run(folder: Path, task: Task, *, kill_at: int | None, deadline_s: float) -> dict[str, Any]:
    """Run it to its end; figures of what was seen."""
    loaded = load_run(make(folder, task, name=folder.name))
    root = RunRoot(folder / "run")
    start_run(loaded)
    began = time.monotonic()
    memory, killed = _Memory(), None
    while True:
        time.sleep(POLL_S)
        memory.look()
        view = workflow.read(root)
        if view is not None and view.state in ("complete", "failed"):
            break
        if kill_at is not None and killed is None and view is not None and view.update >= kill_at:
            killed = {"update": view.update, "pid": _kill_engine(), "at": time.time()}
        if time.monotonic() - began > deadline_s:
            _end(root)
            break
    view = workflow.read(root)
    return {
        "state": None if view is None else view.state,
        "update": None if view is None else view.update,
        "wall_s": round(time.monotonic() - began, 1),
        "peak_gpu_mib": memory.peak,
        **figures(root, task),
        "killed": None if killed is None else {**killed, **_return(root, killed["at"])},
    }


def figures(root: RunRoot, task: Task) -> dict[str, Any]:
    """Medians after the first updates, from the run's own files."""
    rows = [json.loads(line) for line in _lines(root.path / "metrics.jsonl")]
    train = [r["values"] for r in rows if r["axis"] == "train/update"][WARM:]
    rollout = [r["values"] for r in rows if r["axis"] == "rollout/collection"][WARM:]
    decisions = list(read_decisions(root.path / "publications.jsonl"))[WARM:]
    tokens = statistics.median([v["rollout/num_tokens"] for v in rollout] or [0.0])
    seconds = _median(train, "train/elapsed_s/update")
    trained = tokens + task.groups * task.samples * task.prompt_tokens
    return {
        "s_per_update": seconds,
        "generated_tokens_per_s_per_gpu": round(tokens / seconds / max(task.gpus, 1), 1)
        if seconds else None,
        "trained_tokens_per_s_per_gpu": round(trained / seconds / max(task.gpus, 1), 1)
        if seconds else None,
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


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _kill_engine() -> int:
    """Kill the newest scheduler of SGLang, or the embedded server; the owner's own stays."""
    marks = ("sglang::scheduler", "runtime.engines.embedded.server")
    found = [
        p for p in psutil.process_iter(["cmdline", "create_time"])
        if any(mark in " ".join(p.info["cmdline"] or []) for mark in marks)
    ]  # fmt: skip
    victim = max(found, key=lambda p: p.info["create_time"])
    victim.send_signal(signal.SIGKILL)
    return victim.pid


def _return(root: RunRoot, at: float) -> dict[str, Any]:
    """When the killed engine was found dead, answered again, and was verified."""
    seen: dict[str, Any] = {}
    for line in _lines(root.path / "pipeline_lifecycle.jsonl"):
        row = json.loads(line)
        event, when = row.get("event"), row.get("time", 0.0)
        if event in ("engine.died", "engine.restarted") and when >= at:
            seen.setdefault(f"{event}_after_s", round(when - at, 2))
    for decision in read_decisions(root.path / "publications.jsonl"):
        if "engine.restarted_after_s" in seen and decision.started_at >= at:
            after = decision.started_at - at
            if after >= seen["engine.restarted_after_s"] and decision.outcome == "published":
                seen["verified_again"] = [decision.kind, decision.policy, len(decision.verified)]
                break
    return seen


class _Memory:
    """Peak of all GPUs, in MiB, as the driver tells it."""

    def __init__(self) -> None:
        self.peak: list[int] = []

    def look(self) -> None:
        import subprocess

        try:
            told = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, check=True, timeout=10,
            ).stdout  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return
        now = [int(line) for line in told.split()]
        self.peak = [max(pair) for pair in zip(self.peak or now, now, strict=True)]


def _end(root: RunRoot) -> None:
    """End a run that takes too long: its guard, which takes the rest along."""
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "runtime.session.guard" in line and str(root.path) in line:
            process.terminate()


def main() -> None:
    """Run one layout and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="one")
    parser.add_argument("--engine-python", default="", help="empty: the embedded engine")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--deadline", type=float, default=240.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/milepost-gpu"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name = f"{arguments.layout}-{os.getpid()}"
    task = task_of(arguments)
    found = run(
        arguments.folder / name, task, kill_at=arguments.kill_at, deadline_s=arguments.deadline
    )
    text = json.dumps({"layout": arguments.layout, "updates": task.updates, **found}, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
