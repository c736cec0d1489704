"""Two ranks over gloo, in processes of their own, against one."""

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from runtime.trainer.protocol import TrainBatch
from runtime.trainer.settings import LossSettings, OptimizerSettings, TrainerSettings
from runtime.trainer.torch.backend import TorchTrainer
from runtime.trainer.torch.ranks import Ranks
from tests.runtime.trainer.tiny import make_sequences

pytestmark = pytest.mark.timeout(240)

SETTINGS = TrainerSettings(
    loss=LossSettings.named("grpo", kl="k3", kl_coef=0.1, entropy_coef=0.01),
    optimizer=OptimizerSettings(lr=1e-2),
    max_tokens_per_bin=40,
    updates_per_collection=2,
)


@dataclass
class Found:
    values: list[dict[str, float]]
    scores: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    specs: list[tuple[str, str, tuple[int, ...]]]
    restored: dict[str, object] | None


def batch(collection: int) -> TrainBatch:
    # The third collection has fewer sequences than there are ranks.
    groups, samples = (1, 1) if collection == 3 else (4, 3)
    sequences = make_sequences(collection, groups=groups, samples=samples)
    return TrainBatch(
        update=2 * collection, sequences=sequences, consumed_digest=f"digest-{collection}"
    )


def run(ranks: Ranks, model: Path, *, save: Path | None = None, start: Path | None = None) -> Found:
    """Collections 1 to 4, or 3 and 4 from a state; saved after the second."""
    one = TorchTrainer(SETTINGS, ranks)
    one.load(str(model))
    restored = None if start is None else one.restore(str(start))
    values: list[dict[str, float]] = []
    for collection in range(one.update // 2 + 1, 5):
        if collection == 3 and save is not None:
            save.mkdir(exist_ok=True)
            one.write_staged(one.stage().token, str(save))
        values.append(one.train_step(batch(collection)).values)
    return Found(
        values=values,
        scores=[torch.from_numpy(s) for s in one.score(batch(9).sequences, temperature=1.0)],
        weights={n: t.clone() for bucket in one.export_weights(4000) for n, t in bucket},
        specs=[(s.name, s.dtype, s.shape) for s in one.weight_specs()],
        restored=restored,
    )


def rank_main(rank: int, pipe: Connection, model: Path, base: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    ranks = Ranks(rank, 2)
    port = 0
    if rank == 0:
        port = ranks.listen("127.0.0.1", timeout_s=60)
        pipe.send(port)
    else:
        port = pipe.recv()
    ranks.join("127.0.0.1", port, backend="gloo", timeout_s=60)
    fresh = run(ranks, model, save=base / "two")
    resumed = run(ranks, model, start=base / "one")
    torch.save([vars(fresh), vars(resumed)], base / f"found-{rank}.pt")
    ranks.leave()


@contextmanager
def rank_process(
    rank: int, model: Path, base: Path
) -> Iterator[tuple[Connection, multiprocessing.Process]]:
    # Spawned: a fork of a process whose threads are at work inherits their locks, held.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_main, args=(rank, theirs, model, base))
    process.start()
    try:
        yield ours, process  # type: ignore[misc]
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> tuple[Found, list[Found], list[Found], Path]:
    """(one rank, two ranks, two ranks from the state of one, where states lie)."""
    base = tmp_path_factory.mktemp("ranks")
    alone = run(Ranks(), model_folder, save=base / "one")
    with rank_process(0, model_folder, base) as (first, a):
        assert first.poll(90), "rank 0 did not listen"
        port = first.recv()
        with rank_process(1, model_folder, base) as (second, b):
            second.send(port)
            a.join(90)
            b.join(90)
            assert (a.exitcode, b.exitcode) == (0, 0)
    loaded = [torch.load(base / f"found-{rank}.pt") for rank in range(2)]
    fresh, resumed = ([Found(**found[i]) for found in loaded] for i in range(2))
    return alone, fresh, resumed, base


Runs = tuple[Found, list[Found], list[Found], Path]


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative distance of two sets of weights."""
    assert a.keys() == b.keys()
    difference = sum((a[n] - b[n]).double().square().sum().item() for n in a)
    return (difference / sum(t.double().square().sum().item() for t in a.values())) ** 0.5


def figures(values: dict[str, float]) -> dict[str, float]:
    return {name: v for name, v in values.items() if not name.startswith("elapsed_s")}


def test_two_ranks_equal_one(runs: Runs) -> None:
    alone, (two, _), _, _ = runs
    for name in ("loss", "policy_grad_norm", "total_grad_norm", "entropy"):
        assert two.values[0][name] == pytest.approx(alone.values[0][name], rel=1e-5), name
    for mine, theirs in zip(alone.values, two.values, strict=True):
        assert figures(theirs) == pytest.approx(figures(mine), rel=2e-4, abs=1e-5)
    assert gap(alone.weights, two.weights) < 1e-5
    assert alone.specs == two.specs
    for mine, theirs in zip(alone.scores, two.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_all_ranks_report_the_same(runs: Runs) -> None:
    _, (first, second), _, _ = runs
    assert [figures(v) for v in first.values] == [figures(v) for v in second.values]
    assert all(torch.equal(a, b) for a, b in zip(first.scores, second.scores, strict=True))
    assert gap(first.weights, second.weights) == 0


def test_two_ranks_read_the_state_of_one(runs: Runs) -> None:
    alone, _, (resumed, _), _ = runs
    assert resumed.restored == {"update": 4, "consumed_digest": "digest-2"}
    assert len(resumed.values) == 2
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
