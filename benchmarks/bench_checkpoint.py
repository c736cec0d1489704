"""P6: what a checkpoint costs the trainer, and how fast a commit is written.

A state of ``--megabytes`` in host memory is staged and committed the way a run does it (the
trainer's own staging and files, hashed and synced as they grow, then ledger segment and chain
record). Its copy runs beside the passes of the next update, and the stall is the call plus what the
optimizer's step still waits for: after ``--passes-s`` of other work, and at once. Against it, in
the same rounds: a plain copy of the state (the stall's floor), the same files written and synced
while the trainer waits (what a synchronous save stalls), and raw bytes written and synced (the
commit's anchor).

    python -m benchmarks.bench_checkpoint --megabytes 512 --rounds 5 --folder /some/disk --out
    p6.json
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

from benchmarks.reporting import quiet_load, report
from runtime.checkpoints.commit import Committer
from runtime.checkpoints.files import remove_folder
from runtime.checkpoints.identity import RunIdentity
from runtime.checkpoints.retention import retain
from runtime.data.ledger import Ledger
from runtime.data.order import PromptOrder
from runtime.data.segments import LedgerSegment
from runtime.policy import PolicyId
from runtime.rundir.chain import Chain
from runtime.rundir.layout import RunRoot
from runtime.rundir.records import CommitRecord, EpochRecord
from runtime.trainer.protocol import StagedState
from runtime.trainer.torch.record import RankRecord
from runtime.trainer.torch.staging import Staging


class State:
    """A trainer that is nothing but its state, staged and written by the trainer's own code."""

    def __init__(self, megabytes: int) -> None:
        count = max(1, megabytes * 1_000_000 // (16 << 20))
        self.tensors = {f"master/{i}": torch.randn(4 << 20) for i in range(count)}
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())
        self.update = 0
        self._staging = Staging()

    def stage_now(self) -> StagedState:
        """Copy everything."""
        record = RankRecord(
            rank=0, world_size=1, update=self.update, consumed_digest="", optimizer_steps=0,
            skipped_steps=0, slices={},
        )  # fmt: skip
        return self._staging.stage(self.tensors, record)

    def settle(self) -> None:
        """What the next optimizer step does first."""
        self._staging.settle()

    def write_now(self, token: str, folder: Path) -> dict[str, str]:
        """Write a copy, synced."""
        return self._staging.write(token, folder)

    def save(self, folder: Path) -> None:
        """A synchronous save: the trainer waits for all of it."""
        self.write_now(self.stage_now().token, folder)

    async def stage(self) -> Sequence[StagedState]:
        """For the commit."""
        return [await anyio.to_thread.run_sync(self.stage_now)]

    async def write_staged(self, staged: Sequence[StagedState], folder: str) -> dict[str, str]:
        """For the commit."""
        return await anyio.to_thread.run_sync(self.write_now, staged[0].token, Path(folder))


def timed(action: Any) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_raw(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Plain bytes and one fsync."""
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for tensor in tensors.values():
            view = memoryview(tensor.view(torch.uint8).numpy())
            while view:
                view = view[os.write(fd, view[: 8 << 20]) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    (folder / "raw").unlink()


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    root = RunRoot.of(folder / "run")
    root.create()
    Chain(root).append(
        EpochRecord(
            epoch=1, time=time.time(), attempt=1, host="bench", pid=os.getpid(), boot_id="",
            started=0.0, reason="benchmark", lease_s=30.0,
        )
    )  # fmt: skip
    state, ledger = State(arguments.megabytes), Ledger(PromptOrder(1000))
    targets = {name: torch.empty_like(tensor) for name, tensor in state.tensors.items()}
    factor = torch.randn(256, 256)
    rows: list[dict[str, float]] = []

    async def committed(record: CommitRecord, segment: LedgerSegment) -> None:
        ledger.committed(segment)

    async with anyio.create_task_group() as tasks:
        committer = Committer(
            root=root, epoch=1, source=state, tasks=tasks, on_committed=committed, parent=None,
            identity=RunIdentity(training_digest="", layout={}, data_fingerprint=""),
        )  # fmt: skip
        await committer.commit_initial(ledger.snapshot(), PolicyId(1, 0), {})
        for at in range(arguments.rounds + 1):
            state.update += 1
            row = {
                "copy_s": timed(lambda: [targets[n].copy_(t) for n, t in state.tensors.items()]),
                "write_fsync_s": timed(lambda: write_raw(folder, state.tensors)),
            }
            whole = folder / "synchronous"
            whole.mkdir()
            row["synchronous_s"] = timed(partial(state.save, whole))
            remove_folder(whole)
            cpu, start = time.process_time(), time.perf_counter()
            boundary = await committer.boundary(PolicyId(1, state.update), ledger.snapshot)
            row["boundary_s"] = time.perf_counter() - start
            # Even rounds: an optimizer step that comes at once. Odd ones: after other work.
            passes = time.perf_counter() + at % 2 * arguments.passes_s
            while time.perf_counter() < passes:
                torch.mm(factor, factor)
            kind = "stall_s" if at % 2 else "stall_at_once_s"
            row[kind] = boundary.stall_s + timed(state.settle)
            await committer.settle()
            row["commit_s"] = time.perf_counter() - start
            row["commit_cpu_s"] = time.process_time() - cpu
            retain(root, 1, keep=1)
            if at > 0:  # the first round touches the pages
                rows.append(row)
    keys = {key: None for row in rows for key in row}
    columns = {key: sorted(row[key] for row in rows if key in row) for key in keys}
    median = {key: statistics.median(values) for key, values in columns.items()}
    return {
        "num_bytes": state.num_bytes,
        "median": {key: round(value, 5) for key, value in median.items()},
        "spread": {key: [round(v[0], 5), round(v[-1], 5)] for key, v in columns.items()},
        "stall_over_copy": round(median["stall_s"] / median["copy_s"], 3),
        "stall_at_once_over_copy": round(median["stall_at_once_s"] / median["copy_s"], 3),
        "stall_at_once_over_synchronous": round(
            median["stall_at_once_s"] / median["synchronous_s"], 4
        ),
        "boundary_over_copy": round(median["boundary_s"] / median["copy_s"], 3),
        "stall_over_synchronous": round(median["stall_s"] / median["synchronous_s"], 4),
        "commit_over_write_fsync": round(median["write_fsync_s"] / median["commit_s"], 3),
        "copy_gb_per_s": round(state.num_bytes / median["copy_s"] / 1e9, 2),
        "write_fsync_gb_per_s": round(state.num_bytes / median["write_fsync_s"] / 1e9, 3),
        "commit_gb_per_s": round(state.num_bytes / median["commit_s"] / 1e9, 3),
    }


def main() -> None:
    """Run it and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument(
        "--passes-s", type=float, default=0.5, help="forward and backward before the next step"
    )
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--any-load", action="store_true", help="start above a load of 0.5 too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load = quiet_load(any_load=arguments.any_load)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = anyio.run(measure, Path(folder), arguments)
    found |= {"benchmark": "P6", "rounds": arguments.rounds}
    report(found, load=load, out=arguments.out)


if __name__ == "__main__":
    main()
