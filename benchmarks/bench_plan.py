"""P8: what `plan` and `validate` cost beside an interpreter that does nothing.

    python benchmarks/bench_plan.py [--rounds 9] [--file configs/presets/laptop.toml]

Every round runs all cases once, one after the other, so that a busy machine is busy for all.
Cold means that no module has been compiled: a fresh, empty bytecode cache, thrown away afterwards.
Prints one JSON object: medians and spread of wall time and CPU seconds, ratios to `python -c pass`,
and the heavy modules that were loaded (there must be none).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HEAVY = ("torch", "ray", "prefect", "sglang", "transformers", "numpy")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--file", default="configs/presets/laptop.toml")
    arguments = parser.parse_args()
    commands = {
        "pass": ["-c", "pass"],
        "plan": ["-m", "flows.cli", "plan", arguments.file, "--json"],
        "validate": ["-m", "flows.cli", "validate", arguments.file, "--json"],
    }
    load_before = os.getloadavg()[0]
    for command in commands.values():
        run_once(command, cold=False)  # writes the bytecode that warm runs read
    samples: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            samples.setdefault(f"{name}_warm", []).append(run_once(command, cold=False))
            samples.setdefault(f"{name}_cold", []).append(run_once(command, cold=True))
    print(json.dumps(report(samples, arguments.rounds, load_before, commands["plan"]), indent=2))


def run_once(command: list[str], *, cold: bool) -> tuple[float, float]:
    """Wall time and CPU seconds of one run, in a process of its own."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as empty:
        if cold:
            environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": empty}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment
        )
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


def report(
    samples: dict[str, list[tuple[float, float]]],
    rounds: int,
    load_before: float,
    plan: list[str],
) -> dict[str, object]:
    """Medians, spread and ratios."""
    idle_wall = statistics.median(wall for wall, _ in samples["pass_warm"])
    cases: dict[str, object] = {}
    for name, rows in samples.items():
        walls, cpus = [wall for wall, _ in rows], [cpu for _, cpu in rows]
        cases[name] = {
            "wall_s": round(statistics.median(walls), 4),
            "wall_min_s": round(min(walls), 4),
            "wall_max_s": round(max(walls), 4),
            "cpu_s": round(statistics.median(cpus), 4),
            "wall_over_pass": round(statistics.median(walls) / idle_wall, 1),
        }
    return {
        "id": "P8",
        "target": {"plan_warm_wall_s": 0.3, "heavy_modules": []},
        "cases": cases,
        "heavy_modules": heavy_modules(plan),
        "rounds": rounds,
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def heavy_modules(plan: list[str]) -> list[str]:
    """Heavy modules that a plan leaves in `sys.modules`."""
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n"
        f"    main({plan[2:]!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('\\n' + ' '.join(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1].split()


if __name__ == "__main__":
    main()
