"""P7: how long until a fault is found, decided and made good, and what it costs.

    python -m benchmarks.bench_faults --rounds 3 --out faults.json

One run of the laptop preset with the health monitor as it is shipped (10 s, 10 s, 3 misses), struck
again and again, the kinds in turn: the engine's server is killed, the engine's server is stopped
(SIGSTOP: it accepts connections and answers nothing), the session is killed. In the end it is told
to finish, and the ledger says what was lost or doubled. Random kills of everything: milepost drill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from configs.load import load_run
from runtime.data.history import read_history
from runtime.launch.start import start_run
from runtime.rundir import history
from runtime.rundir.chain import Chain
from runtime.rundir.control import Control
from runtime.rundir.layout import RunRoot
from runtime.rundir.processes import ATTEMPT_VARIABLE
from runtime.session.accounts import committed_segments
from runtime.session.answers import Lost
from runtime.session.ensure import ensure

PRESET = Path(__file__).parent.parent / "configs/presets/laptop.toml"
SETS = (
    "core.max_updates=100000",
    "data.epochs=1000",
    "evaluation.every_updates=100000",
    "checkpoint.every_updates=20",
    "output.export_hf=false",
    'tracking.mode="disabled"',
)
DEADLINE_S = 400.0
KINDS = ("engine killed", "engine stopped", "session killed")
_PARTS = {"engine": "runtime.engines.embedded.server", "session": "runtime.session.driver"}


class Struck:
    """One run, watched through its own files."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.root = RunRoot(folder / "run")
        self.loaded = load_run(PRESET, (*SETS, f'output.root="{self.root.path}"'))
        self.control = Control(self.root)
        self.rng = rng

    # -- what is there --------------------------------------------------------------------------

    def rows(self, path: Path, since: float) -> Iterator[dict[str, Any]]:
        """Rows of a file made after ``since``."""
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.endswith("}"):
                row = json.loads(line)
                if row["time"] > since:
                    yield row

    def event(self, name: str, since: float) -> float | None:
        """When a lifecycle event first came after ``since``."""
        rows = self.rows(self.root.pipeline_lifecycle, since)
        return next((row["time"] for row in rows if row["event"] == name), None)

    def trained(self, since: float) -> dict[str, Any] | None:
        """The first update made after ``since``."""
        rows = self.rows(self.root.path / "metrics.jsonl", since)
        return next((row for row in rows if row["axis"] == "train/update"), None)

    def update(self) -> int:
        """Newest update trained, of whichever epoch."""
        rows = self.rows(self.root.path / "metrics.jsonl", 0.0)
        return max((int(r["step"]) for r in rows if r["axis"] == "train/update"), default=0)

    def process(self, part: str) -> psutil.Process:
        """The one process of the run that plays this part."""
        ours = f"{self.root.attempts}/"
        for process in psutil.process_iter():
            try:
                is_part = _PARTS[part] in process.cmdline()
                if is_part and process.environ().get(ATTEMPT_VARIABLE, "").startswith(ours):
                    return process
            except psutil.Error:
                continue
        raise SystemExit(f"no {part} of this run")

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Wait for something, attached."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := found()):
            self.control.attach()
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {DEADLINE_S:g} s for {what}: see {self.root.path}")
            time.sleep(0.1)
        return value

    # -- strikes --------------------------------------------------------------------------------

    def steady(self) -> None:
        """Until it trains again and has committed since, and a random moment more."""
        now = time.time()
        at = history.committed_update(Chain(self.root).read())
        self.until(lambda: self.trained(now), "training")
        self.until(lambda: history.committed_update(Chain(self.root).read()) >= at + 20, "a commit")
        time.sleep(self.rng.uniform(1.0, 11.0))

    def strike(self, kind: str) -> dict[str, float]:
        """Deal one fault and time what follows; seconds from the blow."""
        if kind == "session killed":
            return self._session()
        process = self.process("engine")
        before, at = self.update(), time.time()
        process.send_signal(signal.SIGKILL if kind == "engine killed" else signal.SIGSTOP)
        died = self.until(lambda: self.event("engine.died", at), "the death to be seen")
        started = self.until(lambda: self.event("engine.restarted", died), "a new server")
        verified = self.until(lambda: self.event("engine.verified", started), "its weights")
        trained = self.until(lambda: self.trained(verified), "training")
        return {
            "detected_s": died - at,
            "server_again_s": started - at,
            "serving_again_s": verified - at,
            "training_again_s": trained["time"] - at,
            "updates_redone": max(0, before + 1 - int(trained["step"])),
        }

    def _session(self) -> dict[str, float]:
        before = self.update()
        epoch = history.newest_epoch(Chain(self.root).read())
        assert epoch is not None
        at = time.time()
        self.process("session").kill()
        answer = self.until(self._lost, "the loss to be seen")
        seen = time.time()
        start_run(self.loaded, reason="struck", lost_attempt=answer.attempt)
        begun = self.until(lambda: self._epoch_after(epoch.epoch), "a new epoch")
        ready = self.until(lambda: self.event("session.ready", begun), "a ready session")
        trained = self.until(lambda: self.trained(ready), "training")
        return {
            "detected_s": seen - at,
            "epoch_taken_s": begun - at,
            "serving_again_s": ready - at,
            "training_again_s": trained["time"] - at,
            "updates_redone": max(0, before + 1 - int(trained["step"])),
        }

    def _lost(self) -> Lost | None:
        answer = ensure(self.root, "finish", timeout_s=0.0)
        return answer if isinstance(answer, Lost) else None

    def _epoch_after(self, epoch: int) -> float | None:
        newest = history.newest_epoch(Chain(self.root).read())
        return newest.time if newest is not None and newest.epoch > epoch else None

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> dict[str, int]:
        """Tell it to finish, and count what became of every prompt."""
        records = Chain(self.root).read()
        newest = history.newest_epoch(records)
        assert newest is not None
        self.control.request_stop("final", epoch=newest.epoch, by="bench", time=time.time())
        self.until(lambda: history.is_complete(Chain(self.root).read()), "the end")
        report = read_history(committed_segments(self.root, Chain(self.root).read()))
        return {"prompts_lost": report.lost, "prompts_doubled": report.doubled}


def main() -> None:
    """Read the command line, strike, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the blows")
    parser.add_argument("--out", type=Path, help="write the JSON there instead of printing it")
    args = parser.parse_args()
    load = os.getloadavg()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="mpf-") as folder:
        run = Struck(Path(folder), random.Random(args.seed))
        start_run(run.loaded, reason="bench")
        run.until(lambda: run.trained(0.0), "the first update")
        for number in range(args.rounds):
            # An engine slot has three restarts an hour in one session: the session goes last.
            for kind in KINDS:
                run.steady()
                found[kind].append(run.strike(kind))
                print(json.dumps({"round": number, "kind": kind, **found[kind][-1]}), flush=True)
        run.steady()
        end = run.finish()
    answer = {
        "load_before": load,
        "load_after": os.getloadavg(),
        "cores": os.cpu_count(),
        "health": {"interval": 10, "timeout": 10, "misses": 3},
        **end,
        "faults": {kind: _summary(rows) for kind, rows in found.items()},
    }
    text = json.dumps(answer, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        key: {
            "median": round(statistics.median(values), 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
        }
        for key, values in columns.items()
    } | {"times": len(rows)}


if __name__ == "__main__":
    main()
