"""Ceilings of the GPUs of one machine: matrix product, copy, and what links carry (P5, P10, P11).

One process a GPU. Matrix product: 8192^3 in bf16. Copy: 2 GiB device to device, bytes read plus
written. Links: a direct copy of 1 GiB from GPU 0 to GPU 1, a broadcast of ``--megabytes`` from rank
0 to all, and an all-reduce of the same, all over NCCL but the first.

    python -m benchmarks.gpu_links --out links.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl as nccl
import torch.distributed as dist

ROUNDS = 10


def timed(step: Callable[[], Any]) -> float:
    """Median seconds of a step, after three of warm-up."""
    for _ in range(3):
        step()
    found: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def matmul_tflops(size: int = 8192) -> float:
    """Of two random bf16 matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return round(2 * size**3 / timed(lambda: a @ b) / 1e12, 1)


def copy_tb_per_s(num_bytes: int = 2**31) -> float:
    """Read plus written."""
    a = torch.randint(255, (num_bytes,), device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return round(2 * num_bytes / timed(lambda: b.copy_(a)) / 1e12, 2)


def rank_main(rank: int, size: int, num_bytes: int, out: str) -> None:
    """One GPU's part."""
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("nccl", rank=rank, world_size=size)
    found: dict[str, Any] = {"matmul_tflops": matmul_tflops(), "copy_tb_per_s": copy_tb_per_s()}
    buffer = torch.randint(255, (num_bytes,), device="cuda", dtype=torch.uint8)
    half = buffer.view(torch.bfloat16)
    if size > 1:
        if rank == 0:
            there = torch.empty(2**30, dtype=torch.uint8, device="cuda:1")
            here = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
            found["peer_copy_gb_per_s"] = round(2**30 / timed(lambda: there.copy_(here)) / 1e9, 1)
        dist.barrier()
        found["broadcast_gb_per_s"] = round(
            num_bytes / timed(lambda: dist.broadcast(buffer, 0)) / 1e9, 1
        )
        seconds = timed(lambda: dist.all_reduce(half))
        found["all_reduce_bus_gb_per_s"] = round(
            2 * (size - 1) / size * num_bytes / seconds / 1e9, 1
        )
        # Two alone: what a publication to one engine can reach.
        pair: Any = dist.new_group([0, 1])
        if rank < 2:
            seconds = timed(lambda: dist.broadcast(buffer, 0, group=pair))
            found["broadcast_to_one_gb_per_s"] = round(num_bytes / seconds / 1e9, 1)
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Run on every GPU there is and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1192)
    parser.add_argument("--out", type=Path, default=Path("links.json"))
    arguments = parser.parse_args()
    size = torch.cuda.device_count()
    if size == 0:
        raise SystemExit("there is no GPU here")
    spawn: Any = torch.multiprocessing.spawn
    spawn(rank_main, args=(size, arguments.megabytes * 1_000_000, str(arguments.out)), nprocs=size)
    found = {
        "gpus": size,
        "name": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl.version())),
        **json.loads(arguments.out.read_text()),
    }
    text = json.dumps(found, indent=1)
    arguments.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
