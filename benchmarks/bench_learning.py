"""Does the laptop task learn, seed after seed? P1's "0.9 in at least 9 of 10 seeds".

    python -m benchmarks.bench_learning --seeds 10 --out learning.json

Each seed is a ``bare_loop`` in a process of its own, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def one_seed(seed: int, updates: int, stop: float, folder: Path) -> dict[str, Any]:
    """Run one bare loop; its JSON without the curve, which is thinned out."""
    out = folder / f"{seed}.json"
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--seed", str(seed)]
    command += ["--updates", str(updates), "--stop", str(stop), "--out", str(out)]
    subprocess.run(command, check=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result = json.loads(out.read_text())
    curve = result["curve"]
    result["curve"] = curve[:: max(1, len(curve) // 20)]
    return result


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How many seeds got there, and after how much."""
    reached = [r["reached_0_9"] for r in results if r["reached_0_9"]]
    return {
        "seeds": len(results),
        "reached_0_9": len(reached),
        "updates": [r["update"] for r in reached],
        "updates_median": statistics.median(r["update"] for r in reached) if reached else None,
        "cpu_s_median": statistics.median(r["cpu_s"] for r in reached) if reached else None,
        "holdout_greedy": [r["holdout_greedy"] for r in results],
        "cpu_s_per_update_median": statistics.median(r["cpu_s_per_update_median"] for r in results),
        "machine": results[-1]["machine"],
    }


def main() -> None:
    """Read the command line, run all seeds, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--updates", type=int, default=400, help="at most, per seed")
    parser.add_argument("--stop", type=float, default=0.95)
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [
            one_seed(seed, args.updates, args.stop, Path(folder))
            for seed in range(args.first, args.first + args.seeds)
        ]
    text = json.dumps({"summary": summary(results), "runs": results}, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
