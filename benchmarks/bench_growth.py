"""P12, Prefect's part: what 1,000 collections leave in the server's database and its UI.

    python -m benchmarks.bench_growth --collections 1000 --every 50 10

A server of its own on a new SQLite database. The run is one that has trained already: its chain and
its rows are there, so the flow's own tasks (segments, commits, artifacts) run one after another and
the server gets exactly what a live run would tell it. Rows and bytes, before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from configs.load import load_run
from configs.plan import make_plan
from flows.commands._server import HOST, api_url, environment, is_healthy
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.records import CommitRecord, EndRecord, EpochRecord

PRESET = Path(__file__).parent.parent / "configs/presets/laptop.toml"
TABLES = ("flow_run", "flow_run_state", "task_run", "task_run_state", "artifact", "log", "events")
SETTLE_S = 15.0
"""For events that the server still has to write."""


def made_run(folder: Path, *, collections: int, every: int) -> list[str]:
    """A complete run's chain and rows; returns what the run file is told."""
    sets = [
        f'output.root="{folder}"',
        f"core.max_updates={collections}",
        f"checkpoint.every_updates={every}",
        "evaluation.every_updates=1000000",
        "evaluation.final=false",
        "output.export_hf=false",
    ]
    handle = load_run(PRESET, sets)
    assert handle.spec.core.updates_per_collection == 1
    (folder / "chain").mkdir(parents=True)
    from runtime.rundir.layout import RunRoot

    root = RunRoot.of(folder)
    root.create()
    chain = Chain(root)
    chain.append(
        EpochRecord(
            epoch=1, time=0.0, attempt=1, host="h", pid=1, boot_id="b", started=1.0,
            reason="made", lease_s=30.0,
        )
    )  # fmt: skip
    for update in range(0, collections + 1, every):
        chain.append(_commit(update))
    end = EndRecord(epoch=1, time=0.0, state="complete", ended_by="max_updates", update=collections)
    chain.append(end)
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, collections + 1):
            values = {
                "rollout/reward_mean": 0.512345, "rollout/length_mean": 5.9123,
                "rollout/staleness_mean": 0.51, "rollout/mixed_groups": 30,
                "rollout/tokens_per_s": 8123.4,
            }  # fmt: skip
            row = {"axis": "rollout/collection", "step": number, "epoch": 1, "values": values}
            file.write(json.dumps(row) + "\n")
    return sets


def _commit(update: int) -> CommitRecord:
    return CommitRecord(
        epoch=1, time=0.0, format_version=1, update=update, policy=str(PolicyId(1, update)),
        training_digest="d", layout={}, data_fingerprint="f", ledger_checksum="l",
        consumed_digest="c", folder=f"checkpoints/{update:06d}-e1", files=(),
    )  # fmt: skip


def show(sets: list[str]) -> None:
    """Run the flow's own tasks over every stretch of the run; in a process of its own."""
    from prefect import flow

    from tasks.handle import RunHandle
    from tasks.segment import commit_checkpoint, train_segment

    loaded = load_run(PRESET, sets)
    handle = RunHandle(loaded=loaded, plan=make_plan(loaded), attempt=1, seen_from=0)

    @flow(name="train")
    def growth() -> None:
        after = 0
        while after < handle.last_update:
            stretch = handle._stretch(after)
            train_segment(handle, stretch)
            commit_checkpoint(handle, stretch)
            after = stretch.update

    growth()


def database(path: Path) -> dict[str, int]:
    """Rows by table, and bytes in use."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        ask = connection.execute
        found = {name: ask(f"SELECT count(*) FROM {name}").fetchone()[0] for name in TABLES}
        pages = ask("PRAGMA page_count").fetchone()[0] - ask("PRAGMA freelist_count").fetchone()[0]
        return {**found, "bytes": pages * ask("PRAGMA page_size").fetchone()[0]}


def measure(collections: int, every: int) -> dict[str, Any]:
    """One cadence of commits on a new database."""
    with tempfile.TemporaryDirectory(prefix="mpg-") as name:
        folder = Path(name)
        sets = made_run(folder / "run", collections=collections, every=every)
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        told = {
            **os.environ,
            **environment(port),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
        }
        server = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "uvicorn",
                    "--factory",
                    "--host",
                    HOST,
                    "--port",
                    str(port),
                ),
                *("--log-level", "error", "prefect.server.api.server:create_app"),
            ],
            env=told,
        )
        try:
            while not is_healthy(port):
                if server.poll() is not None:
                    raise SystemExit("the server ended")
                time.sleep(0.3)
            before = database(folder / "prefect.db")
            started = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "benchmarks.bench_growth", "--show", json.dumps(sets)],
                env={**told, "PREFECT_API_URL": api_url(port), "PREFECT_LOGGING_LEVEL": "WARNING"},
                check=True,
            )
            elapsed_s = time.monotonic() - started
            time.sleep(SETTLE_S)
            after = database(folder / "prefect.db")
        finally:
            server.terminate()
            server.wait(30)
    grown = {name: after[name] - before[name] for name in after}
    return {
        "collections": collections,
        "commit_every": every,
        "empty_bytes": before["bytes"],
        "grown": grown,
        "bytes_per_1000_collections": round(grown["bytes"] * 1000 / collections),
        "flow_s": round(elapsed_s, 1),
    }


def main() -> None:
    """Read the command line, measure each cadence, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--collections", type=int, default=1000)
    parser.add_argument("--every", type=int, nargs="+", default=[50])
    parser.add_argument("--show", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.show))
        return
    print(json.dumps([measure(args.collections, every) for every in args.every], indent=1))


if __name__ == "__main__":
    main()
