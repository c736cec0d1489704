"""Two, four and eight ranks over gloo, in processes of their own, against one."""

import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LoraSettings, LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.ranks import Ranks
from tests.runtime.trainer.tiny import make_sequences

pytestmark = pytest.mark.timeout(900)

COLLECTIVE_S = 300.0
"""Of a loaded machine: one rank may wait this long for another."""
RANKS_S = 600.0
"""For all that the ranks of one test do."""

SETTINGS = TrainerSettings(
    loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1, entropy_coef=0.01),
    optimizer=OptimizerSettings(lr=1e-3),
    max_tokens_per_bin=40,
    updates_per_collection=2,
)

ADAPTERS = replace(SETTINGS, lora=LoraSettings(rank=4, alpha=8.0))


@dataclass
class Found:
    values: list[dict[str, float]]
    scores: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    specs: list[tuple[str, str, tuple[int, ...]]]
    restored: dict[str, object] | None
    base: dict[str, torch.Tensor]
    """What lies under adapters; empty without."""


Runs = tuple[Found, list[Found], list[Found], Path]


def batch(collection: int) -> TrainBatch:
    # In the third collection an update has one sequence: fewer than there are ranks.
    groups, samples = (2, 1) if collection == 3 else (4, 3)
    sequences = make_sequences(collection, groups=groups, samples=samples)
    return TrainBatch(
        update=2 * collection, sequences=sequences, consumed_digest=f"digest-{collection}"
    )


def run(
    ranks: Ranks,
    model: Path,
    *,
    settings: TrainerSettings = SETTINGS,
    save: Path | None = None,
    start: Path | None = None,
    make: Callable[[int], TrainBatch] = batch,
) -> Found:
    """Ten updates in five collections, or the last three of them from a state; saved before."""
    one = TorchTrainer(settings, ranks)
    one.load(str(model))
    restored = None if start is None else one.restore(str(start))
    values: list[dict[str, float]] = []
    for collection in range(one.update // 2 + 1, 6):
        if collection == 3 and save is not None:
            save.mkdir(exist_ok=True)
            one.write_staged(one.stage().token, str(save))
        values.append(one.train_step(make(collection)).values)
    return Found(
        values=values,
        scores=[torch.from_numpy(s) for s in one.score(make(9).sequences, temperature=1.0)],
        weights={n: t.clone() for bucket in one.export_weights(4000) for n, t in bucket},
        specs=[(s.name, s.dtype, s.shape) for s in one.weight_specs()],
        restored=restored,
        base=_base_of(one) if settings.lora is not None else {},
    )


def _base_of(one: TorchTrainer) -> dict[str, torch.Tensor]:
    found = {n: t.clone() for bucket in one.base.export_weights(4000) for n, t in bucket}
    assert list(found) == [spec.name for spec in one.base.weight_specs()]
    return found


@dataclass(frozen=True)
class Job:
    """One run of all ranks."""

    settings: TrainerSettings = SETTINGS
    save: Path | None = None
    start: Path | None = None
    make: Callable[[int], TrainBatch] = batch


def run_jobs(model: Path, jobs: list[Job], ranks: Ranks) -> list[dict[str, Any]]:
    """What this rank found in each job."""
    found = [
        run(ranks, model, settings=j.settings, save=j.save, start=j.start, make=j.make)
        for j in jobs
    ]
    return [vars(f) for f in found]


def rank_main(
    rank: int, size: int, pipe: Connection, work: Callable[[Ranks], object], to: Path
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = Ranks(rank, size)
    try:
        if rank == 0:
            pipe.send(ranks.listen("127.0.0.1", timeout_s=COLLECTIVE_S))
        port = 0 if rank == 0 else pipe.recv()
        ranks.join("127.0.0.1", port, backend="gloo", timeout_s=COLLECTIVE_S)
        torch.save(work(ranks), to / f"found-{size}-{rank}.pt")
        ranks.leave()
    except BaseException:
        (to / f"failed-{size}-{rank}.txt").write_text(traceback.format_exc())
        raise


def run_ranks(size: int, model: Path, jobs: list[Job], to: Path) -> list[list[Found]]:
    """What each rank found in each job, by job and rank."""
    loaded = in_ranks(size, partial(run_jobs, model, jobs), to)
    return [[Found(**found[job]) for found in loaded] for job in range(len(jobs))]


def in_ranks(size: int, work: Callable[[Ranks], object], to: Path) -> list[Any]:
    """What ``work`` returns in each of ``size`` joined ranks; something that torch saves."""
    # Forked from a process without threads that has imported everything: a fork of this one would
    # inherit the locks its threads hold, and eight imports of torch take half a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["runtime.trainer.torch.backend", "transformers.models.qwen3.modeling_qwen3"]
    )
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, size, theirs, work, to))
            process.start()
            processes.append(process)
            pipes.append(ours)
        assert pipes[0].poll(COLLECTIVE_S), f"rank 0 did not listen\n{last_words(size, to)}"
        port = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(port)
        end = time.monotonic() + RANKS_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * size, f"{codes}\n{last_words(size, to)}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(to / f"found-{size}-{rank}.pt") for rank in range(size)]


def last_words(size: int, to: Path) -> str:
    """What the ranks that failed said, the first of them first."""
    said = sorted(to.glob(f"failed-{size}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in said)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Runs:
    """(one rank, two ranks, two ranks from the state of one, where states lie)."""
    base = tmp_path_factory.mktemp("ranks")
    alone = run(Ranks(), model_folder, save=base / "one")
    jobs = [Job(save=base / "two"), Job(start=base / "one")]
    fresh, resumed = run_ranks(2, model_folder, jobs, base)
    return alone, fresh, resumed, base


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative distance of two sets of weights."""
    assert a.keys() == b.keys()
    difference = sum((a[n] - b[n]).double().square().sum().item() for n in a)
    return (difference / sum(t.double().square().sum().item() for t in a.values())) ** 0.5


def figures(values: dict[str, float]) -> dict[str, float]:
    return {name: v for name, v in values.items() if not name.startswith("elapsed_s")}


def test_two_ranks_equal_one(runs: Runs) -> None:
    alone, (two, _), _, _ = runs
    require_equal(alone, two)


def require_equal(alone: Found, other: Found) -> None:
    """Ten updates on one rank and on several."""
    assert sum(v["optimizer_steps"] for v in alone.values) == 10
    for mine, theirs in zip(alone.values, other.values, strict=True):
        for name in ("loss", "policy_loss", "total_grad_norm", "entropy"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-6), name
        assert figures(theirs) == pytest.approx(figures(mine), rel=2e-4, abs=1e-5)
    assert gap(alone.weights, other.weights) < 1e-5
    assert alone.specs == other.specs
    for mine, theirs in zip(alone.scores, other.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks_equal_one_and_read_the_state_of_two(
    runs: Runs, model_folder: Path, tmp_path: Path, size: int
) -> None:
    alone, _, _, base = runs
    # As on GPUs: joint projections, recomputed layers.
    as_there = replace(SETTINGS, joint_projections=True, activation_checkpointing=True)
    jobs = [Job(settings=as_there), Job(start=base / "two"), Job(settings=ADAPTERS)]
    fresh, resumed, with_adapters = run_ranks(size, model_folder, jobs, tmp_path)
    require_equal(alone, fresh[0])
    assert resumed[0].restored == {"update": 4, "consumed_digest": "digest-2"}
    assert gap(alone.weights, resumed[0].weights) < 1e-5
    assert all(gap(fresh[0].weights, other.weights) == 0 for other in fresh[1:])
    adapted = run(Ranks(), model_folder, settings=ADAPTERS)
    require_equal(adapted, with_adapters[0])
    assert adapted.base.keys() == adapted.weights.keys()
    assert all(gap(adapted.base, other.base) == 0 for other in with_adapters)


def test_all_ranks_report_the_same(runs: Runs) -> None:
    _, (first, second), _, _ = runs
    assert [figures(v) for v in first.values] == [figures(v) for v in second.values]
    assert all(torch.equal(a, b) for a, b in zip(first.scores, second.scores, strict=True))
    assert gap(first.weights, second.weights) == 0


def test_two_ranks_read_the_state_of_one(runs: Runs) -> None:
    alone, _, (resumed, _), _ = runs
    assert resumed.restored == {"update": 4, "consumed_digest": "digest-2"}
    assert len(resumed.values) == 3
    assert gap(alone.weights, resumed.weights) < 1e-5


def test_one_rank_reads_the_state_of_two(runs: Runs, model_folder: Path) -> None:
    _, (two, _), _, base = runs
    assert len(list((base / "two").iterdir())) == 4
    resumed = run(Ranks(), model_folder, start=base / "two")
    assert resumed.restored == {"update": 4, "consumed_digest": "digest-2"}
    assert gap(two.weights, resumed.weights) < 1e-5


def test_a_missing_rank_file_is_noticed(runs: Runs, model_folder: Path, tmp_path: Path) -> None:
    from runtime.errors import PartialWrite

    broken = tmp_path / "broken"
    shutil.copytree(runs[3] / "two", broken)
    (broken / "trainer-00001-of-00002.json").unlink()
    with pytest.raises(PartialWrite, match=r"ranks \[0\] of 2"):
        run(Ranks(), model_folder, start=broken)
