"""One trainer rank against two on GPUs: ten updates from the same batches, and states across.

The ranks are those of a run: actors of a Ray of its own, joined by NCCL, sharded by FSDP2. Each
case makes ten updates on one rank and on two, deterministic and without TF32, and compares loss,
gradient norm and parameters: float32 within 1e-5, bf16 as it is. The state after five updates of
either side is restored on the other, which makes the last five again (``--reshard``: which cases).
Then the two share every row instead (``core.context = 2``; ``--sharing``: which cases).

    python -m benchmarks.gpu_ranks --out ranks.json

Needs two GPUs; ``--cpu`` tries it with gloo and the tiny model. Figures are written after each
step. Exits with 1 if a case failed or a float32 one is not within the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch

from benchmarks.gpu_rank_cases import CASES, LIMIT, Case, Side, compare
from benchmarks.gpu_task import make_model
from runtime.session import cluster

if TYPE_CHECKING:
    from runtime.trainer.group import TrainerGroup

UPDATES = 10
SAVED_AT = 5


async def make_side(
    group: TrainerGroup, case: Case, to: Path, *, saves: bool, start: Path | None
) -> Side:
    """All updates, with ``saves`` the state after ``SAVED_AT`` kept; or the last from ``start``."""
    began = time.monotonic()
    await group.load(str(case.model))
    done = 0
    if start is not None:
        done = int(str((await group.restore(str(start)))["update"]))
        assert done == SAVED_AT
    side = Side(values=[], weights=to / "weights", state=to / "state", took_s=0.0)
    for folder in (side.weights, side.state):
        folder.mkdir(parents=True)
    for update in range(done + 1, UPDATES + 1):
        side.values.append((await group.train_step(case.batch(update))).values)
        if saves and update == SAVED_AT:
            await group.write_staged(await group.stage(), str(side.state))
    await group.write_snapshot(str(side.weights))
    side.took_s = round(time.monotonic() - began, 1)
    return side


async def run_case(
    case: Case, folder: Path, *, on_gpu: bool, reshards: bool, shares: bool, found: dict[str, Any],
    write: Any,
) -> None:  # fmt: skip
    """One rank, then two, then each from the other's state, then two that share rows."""
    from runtime.trainer.group import Placement, TrainerGroup

    async def side(ranks: int, to: str, start: Path | None = None, context: int = 1) -> Side:
        placement = Placement(
            ranks=ranks, gpus_per_rank=1.0 if on_gpu else 0.0, start_deadline_s=180.0,
            call_deadline_s=120.0, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )  # fmt: skip
        settings = replace(case.settings(), context=context)
        group = await TrainerGroup.start(settings, placement, epoch=1)
        try:
            made = await make_side(group, case, folder / to, saves=reshards, start=start)
        finally:
            await group.shutdown()
        found[f"{to}_s"] = made.took_s
        write()
        return made

    alone = await side(1, "one")
    both = await side(2, "two")
    found["two against one"] = compare(alone, both, case.model)
    write()
    if reshards:
        found["two from the state of one"] = compare(
            alone, await side(2, "two-resumed", alone.state), case.model
        )
        found["one from the state of two"] = compare(
            both, await side(1, "one-resumed", both.state), case.model
        )
        write()
    if shares:
        sharing = await side(2, "sharing", context=2)
        found["two that share rows against one"] = compare(alone, sharing, case.model)
        write()


async def main_async(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cases; one that fails takes no other's figures along."""
    found: dict[str, Any] = {"torch": torch.__version__, "gpus": torch.cuda.device_count()}

    def write() -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    for name in arguments.cases:
        shape, dtype, longest = CASES[name]
        model = make_model(folder / f"model-{shape}", shape)
        for is_deterministic in (True, False):
            told: dict[str, Any] = {"deterministic": is_deterministic}
            found[name] = told
            case = Case(
                shape=shape, dtype=dtype, longest=longest, model=model,
                is_deterministic=is_deterministic,
            )  # fmt: skip
            to = folder / "case"
            try:
                await run_case(
                    case, to, on_gpu=not arguments.cpu, reshards=name in arguments.reshard,
                    shares=name in arguments.sharing, found=told, write=write,
                )  # fmt: skip
                break
            except Exception as error:  # a kernel without a deterministic form ends its rank
                told["error"] = f"{type(error).__name__}: {error}"[:2000]
                found.setdefault("failed", []).append({name: told})
                write()
            finally:
                shutil.rmtree(to, ignore_errors=True)
    write()
    return found


def main() -> None:
    """Run the cases and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="")
    parser.add_argument("--reshard", default="tiny float32")
    parser.add_argument("--sharing", default=",".join(CASES))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--deadline", type=float, default=280.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for option in ("cases", "reshard", "sharing"):
        names = [name for name in getattr(arguments, option).split(",") if name]
        if unknown := set(names) - CASES.keys():
            parser.error(f"--{option}: no case {sorted(unknown)}; there are {list(CASES)}")
        setattr(arguments, option, names)
    arguments.cases = arguments.cases or (["tiny float32"] if arguments.cpu else list(CASES))
    if not arguments.cpu and torch.cuda.device_count() < 2:
        raise SystemExit("there are no two GPUs here; --cpu tries it without")
    with tempfile.TemporaryDirectory(prefix="mpr-") as name:
        folder = Path(name)
        cluster.set_environment(folder)
        ray = cluster.LocalRay(folder / "r", num_gpus=0 if arguments.cpu else 2)
        ray.start()
        try:

            async def bounded() -> dict[str, Any]:
                with anyio.fail_after(arguments.deadline):
                    return await main_async(arguments, folder)

            found = anyio.run(bounded)
        finally:
            ray.stop()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if problems := failures(found, arguments.cases):
        raise SystemExit("\n".join(problems))


def failures(found: dict[str, Any], cases: list[str]) -> list[str]:
    """Comparisons that are not within the limit, of the cases that have one, and cases that failed.

    bf16 has none: its rounding is told as it is.
    """
    told: list[str] = []
    for name in cases:
        if error := found[name].get("error"):
            told.append(f"{name}: {error}")
        for which, side in found[name].items():
            is_outside = isinstance(side, dict) and not side.get("within", True)
            if is_outside and CASES[name][1] == "float32":
                told.append(f"{name}, {which}: not within {LIMIT:g}")
    return told


if __name__ == "__main__":
    main()
